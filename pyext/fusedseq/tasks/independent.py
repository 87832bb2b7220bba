"""What the tasks share whose batches have nothing to do with each other, and carry nothing: all but ptb."""

import math
from abc import ABC, abstractmethod

import torch

from fusedseq.data import SPLITS
from fusedseq.tasks.training import Step, as_dict


class IndependentBatches(ABC):
    """A task for `Trainer` over splits that are read batch by batch in random order.

    A subclass has `name`, `unit` and the abstract methods below; batches come to them on the model's device.
    settings, data: as of the task's module    model: with its operators    seed: of the order
    """

    name: str
    unit: str
    splits = SPLITS

    def __init__(self, settings, data, model, *, seed, device="cpu"):
        self.settings, self.data, self.seed, self.device = settings, data, seed, torch.device(device)
        self.model = model.to(self.device)

    @abstractmethod
    def batches(self, split, key=None):
        """RowBatches of a split. key: of the order; None: as it is"""

    @abstractmethod
    def _loss(self, batch):
        """-> (objective, loss), scalars"""

    @abstractmethod
    def _score(self, batch):
        """-> a dict of sums over the batch"""

    @abstractmethod
    def _figures(self, sums):
        """-> the dict of figures that the sums over a split make"""

    def description(self):
        return {
            "task": self.name, "settings": as_dict(self.settings), "seed": self.seed, "vocabulary": self.words(),
            "fingerprint": self.data.fingerprint(),
        }  # fmt: skip

    def words(self):
        """JSON: what the model's ids stand for."""
        return self.data.vocabulary.words

    def start_epoch(self, epoch, part=0, parts=1):
        return self.batches("train", f"{self.seed}/{epoch}").shared(part, parts)

    def loss(self, batch):
        objective, loss = self._loss(self.on_device(batch))
        return Step(objective, loss, batch.items)

    def on_device(self, batch):
        """The batch, a NamedTuple, with its tensors on the model's device."""
        moved = {name: t.to(self.device, non_blocking=True) for name, t in batch._asdict().items()
                 if isinstance(t, torch.Tensor)}  # fmt: skip
        return batch._replace(**moved)

    def validate(self):
        return self.evaluate("valid")

    def evaluate(self, split):
        """The figures of a split; call it in eval mode."""
        totals: dict = {}
        with torch.no_grad():
            for batch in self.batches(split):
                for name, value in self._score(self.on_device(batch)).items():
                    totals[name] = totals.get(name, 0) + torch.as_tensor(value, dtype=torch.float64)  # no waiting yet
        return self._figures({name: float(value) for name, value in totals.items()})

    def state_dict(self):
        return {}

    def load_state_dict(self, state):  # noqa: B027  there is nothing to carry, which need not be said again
        pass


def perplexity(loss):
    return math.exp(min(loss, 700.0))


def same_data(description, data, source, name):
    """Errors: ValueError where a checkpoint's data are not these. description: the checkpoint's, or None"""
    if description is not None and description["fingerprint"] != data.fingerprint():
        raise ValueError(f"{name}: the data in {source} are not those the checkpoint was trained on")


def at_least_one(section, *names):
    for name in names:
        if getattr(section, name) < 1:
            raise ValueError(f"data.{name} must be at least 1, got {getattr(section, name)}")
