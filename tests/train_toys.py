"""Trains Toys, one after the other, in each of the processes that torchrun starts: python train_toys.py DIR JSON

JSON: a list of the arguments of `train`. Each process writes DIR/RANK.json: how its runs ended, and which threads of
gloo there are after its group.
"""

import json
import os
import signal
import sys
from pathlib import Path

import torch
from fusedseq.tasks.training import Trainer, TrainingError, TrainingSettings
from fusedseq.tasks.training.processes import started
from toy_task import Toy


def train(processes, out, settings, task=None, resume=False, compile=None, trouble=None):
    """trouble: (rank, call of the loss, what happens then)"""
    toy = Toy(**task or {})
    if trouble and trouble[0] == processes.rank:
        toy.loss = troubled(toy.loss, *trouble[1:])
    torch.manual_seed(0)
    run = Trainer(toy, TrainingSettings(**settings), out, processes=processes, compile=compile)
    if resume:
        run.resume()
    return run.fit(), run.step


def troubled(loss, at, what):
    calls = iter(range(1, 1000))

    def troubles(batch):
        here = next(calls) == at
        if here and what == "memory":
            raise torch.OutOfMemoryError("CUDA out of memory")
        if here and what == "signal":
            os.kill(os.getpid(), signal.SIGTERM)
        step = loss(batch)
        return step._replace(loss=step.loss * float("nan")) if here and what == "nan" else step

    return troubles


def threads():
    names = [path.read_text().strip() for path in Path("/proc/self/task").glob("*/comm")]
    return [name for name in names if "gloo" in name]


def main(folder, runs):
    ends = []
    try:
        with started() as processes:
            assert threads()
            for run in runs:
                ends.append(train(processes, folder / run.pop("name"), **run))
    except TrainingError as error:
        ends.append(str(error))
        left = threads()  # while the error, with its traceback, is alive
    else:
        left = threads()
    (folder / f"{os.environ['RANK']}.json").write_text(json.dumps({"ends": ends, "left": left}))


if __name__ == "__main__":
    main(Path(sys.argv[1]), json.loads(sys.argv[2]))
