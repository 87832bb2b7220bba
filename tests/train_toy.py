"""A Toy trained by the processes that torchrun starts, or by one: python train_toy.py OUT JSON [--resume]"""

import json
import sys
from pathlib import Path

import torch
from fusedseq.tasks.training import Trainer, TrainingSettings
from fusedseq.tasks.training.processes import started
from toy_task import Toy


def main(out, settings, resume):
    task = Toy(**settings.pop("task", {}))
    torch.manual_seed(0)
    with started() as processes:
        run = Trainer(task, TrainingSettings(**settings), out, processes=processes)
        if resume:
            run.resume()
        run.fit()


if __name__ == "__main__":
    main(Path(sys.argv[1]), json.loads(sys.argv[2]), sys.argv[3:] == ["--resume"])
