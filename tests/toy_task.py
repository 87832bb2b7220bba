"""The smallest task a Trainer takes: a classifier of random points, with a state that is carried from batch to batch."""

import torch
from fusedseq.tasks.training import Step


class Toy:
    unit = "points"

    def __init__(self, batch=8, dropout=0.0, double=False):
        generator = torch.Generator().manual_seed(0)
        self.x = torch.randn(48, 5, generator=generator, dtype=torch.float64 if double else torch.float32)
        self.y = (self.x.sum(1) > 0).long()
        self.y[::7] = -100  # does not count: the batches differ in their items
        self.batch, self.seen = batch, 0
        torch.manual_seed(0)
        self.model = torch.nn.Sequential(
            torch.nn.Linear(5, 8), torch.nn.Tanh(), torch.nn.Dropout(dropout), torch.nn.Linear(8, 2)
        ).to(self.x.dtype)

    def description(self):
        return {"task": "toy"}

    def start_epoch(self, epoch):
        self.seen = 0
        order = torch.randperm(len(self.x), generator=torch.Generator().manual_seed(epoch))
        return [(self.x[part], self.y[part]) for part in order.split(self.batch)]

    def loss(self, batch):
        x, y = batch
        self.seen += 1
        loss = torch.nn.functional.cross_entropy(self.model(x), y)
        return Step(loss, loss, int((y >= 0).sum()))

    def validate(self):
        loss = torch.nn.functional.cross_entropy(self.model(self.x), self.y)
        return {"loss": loss.item(), "accuracy": (self.model(self.x).argmax(1) == self.y).double().mean().item()}

    def state_dict(self):
        return {"seen": self.seen}

    def load_state_dict(self, state):
        self.seen = state["seen"]
