"""What the tests of `fusedseq tune` and `fusedseq grid` share."""

import csv
import os

from fusedseq.tasks.training import Trainer


def interrupted_at(step, number, monkeypatch):
    """Sends this process the signal `number` after the training step `step`."""
    train = Trainer._train

    def interrupt(self, batches):
        train(self, batches)
        if self.step == step:
            os.kill(os.getpid(), number)

    monkeypatch.setattr(Trainer, "_train", interrupt)


def table(out, name="trials"):
    """The rows of a CSV file that a study or a grid wrote to the directory `out`."""
    with (out / f"{name}.csv").open() as file:
        return list(csv.DictReader(file))
