"""Trains Toy tasks one after the other, in each process that torchrun starts.

    torchrun ... train_toys.py DIR JSON

JSON is a list of keyword arguments for `train`, one dict for each run. Each process writes
DIR/RANK.json: how its runs ended, and which gloo threads exist after its process group is gone.
"""

import json
import os
import signal
import sys
from pathlib import Path

import torch
from fusedseq.tasks.training import Trainer, TrainingError, TrainingSettings
from fusedseq.tasks.training.processes import started

from tests.support.toy_task import Toy


def train(processes, out, settings, task=None, resume=False, compile=None, trouble=None):
    """trouble: (rank, call, what): on this rank, at this call of the loss (from 1), `what` happens:
    "memory", "signal" or "nan"
    """
    toy = Toy(**task or {})
    if trouble and trouble[0] == processes.rank:
        toy.loss = troubled(toy.loss, *trouble[1:])
    torch.manual_seed(0)
    run = Trainer(toy, TrainingSettings(**settings), out, processes=processes, compile=compile)
    if resume:
        run.resume()
    return run.fit(), run.step


def troubled(loss, call, what):
    calls = iter(range(1, 1000))

    def troubled_loss(batch):
        is_now = next(calls) == call
        if is_now and what == "memory":
            raise torch.OutOfMemoryError("CUDA out of memory")
        if is_now and what == "signal":
            os.kill(os.getpid(), signal.SIGTERM)
        step = loss(batch)
        return step._replace(loss=step.loss * float("nan")) if is_now and what == "nan" else step

    return troubled_loss


def gloo_threads():
    names = [path.read_text().strip() for path in Path("/proc/self/task").glob("*/comm")]
    return [name for name in names if "gloo" in name]


def main(folder, runs):
    ends = []
    try:
        with started() as processes:
            assert gloo_threads()
            for run in runs:
                ends.append(train(processes, folder / run.pop("name"), **run))
    except TrainingError as error:
        ends.append(str(error))
        left = gloo_threads()  # while the error, with its traceback, is alive
    else:
        left = gloo_threads()
    (folder / f"{os.environ['RANK']}.json").write_text(json.dumps({"ends": ends, "left": left}))


if __name__ == "__main__":
    main(Path(sys.argv[1]), json.loads(sys.argv[2]))
