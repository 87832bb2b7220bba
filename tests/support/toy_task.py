"""The smallest task for a Trainer: it classifies random points; state is carried over batches."""

from typing import NamedTuple

import torch
from fusedseq.data.row_batches import RowBatches
from fusedseq.tasks.training import Step


class Batch(NamedTuple):
    x: torch.Tensor  # (B, 5)
    y: torch.Tensor  # (B,)
    items: int


class Points(RowBatches):
    def __init__(self, x, y, batches):
        self.x, self.y, self.batches = x, y, batches

    def __len__(self):
        return len(self.batches)

    def rows(self, i):
        return self.batches[i]

    def batch_of(self, rows):
        return Batch(self.x[rows], self.y[rows], int((self.y[rows] >= 0).sum()))


class Toy:
    """A task for tests of the Trainer; `seen` counts the batches of the epoch."""

    unit = "points"

    def __init__(self, batch=8, dropout=0.0, double=False):
        generator = torch.Generator().manual_seed(0)
        self.x = torch.randn(
            48, 5, generator=generator, dtype=torch.float64 if double else torch.float32
        )
        self.y = (self.x.sum(1) > 0).long()
        self.y[::7] = -100  # ignored: so batches differ in their number of items
        self.batch, self.seen = batch, 0
        torch.manual_seed(0)
        self.model = torch.nn.Sequential(
            torch.nn.Linear(5, 8), torch.nn.Tanh(), torch.nn.Dropout(dropout), torch.nn.Linear(8, 2)
        ).to(self.x.dtype)

    def description(self):
        return {"task": "toy"}

    def start_epoch(self, epoch, part=0, parts=1):
        self.seen = 0
        order = torch.randperm(len(self.x), generator=torch.Generator().manual_seed(epoch))
        return Points(self.x, self.y, order.split(self.batch)).shared(part, parts)

    def loss(self, batch):
        self.seen += 1
        loss = torch.nn.functional.cross_entropy(
            self.model(batch.x), batch.y, reduction="sum"
        ) / max(batch.items, 1)
        return Step(loss, loss, batch.items)

    def validate(self):
        loss = torch.nn.functional.cross_entropy(self.model(self.x), self.y)
        return {
            "loss": loss.item(),
            "accuracy": (self.model(self.x).argmax(1) == self.y).double().mean().item(),
        }

    def state_dict(self):
        return {"seen": self.seen}

    def load_state_dict(self, state):
        self.seen = state["seen"]
