"""The base class of tasks whose batches are independent of each other: all tasks but ptb."""

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import torch

from fusedseq.data import SPLITS
from fusedseq.data.locate import described
from fusedseq.tasks.training.progress import watched
from fusedseq.tasks.training.settings import as_dict
from fusedseq.tasks.training.task import Step


class IndependentBatches(ABC):
    """A task for `Trainer` over splits whose batches are read in random order.

    A subclass has `name`, `unit` and the abstract methods below, which receive batches on the
    model's device.
    settings: the Settings of the task's module    data: the data of the task's module
    model: the network    seed: of the order of the batches    device: where the model is moved to
    """

    name: str
    unit: str
    splits: Sequence[str] = SPLITS

    def __init__(
        self,
        settings: Any,
        data: Any,
        model: torch.nn.Module,
        *,
        seed: int,
        device: torch.device | str = "cpu",
    ) -> None:
        self.settings, self.data, self.seed = settings, data, seed
        self.device = torch.device(device)
        self.model: Any = model.to(self.device)

    @abstractmethod
    def batches(self, split: str, key: str | None = None) -> Any:
        """The RowBatches of a split. key: seeds the random order; None: the order of the data"""

    @abstractmethod
    def _loss(self, batch: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """(objective, loss) of a batch, both scalars."""

    @abstractmethod
    def _score(self, batch: Any) -> dict:
        """Sums over the batch, from which `_metrics` computes the metrics of a split."""

    @abstractmethod
    def _metrics(self, sums: dict) -> dict[str, Any]:
        """The metrics of a split from the sums of `_score` over all its batches."""

    def description(self) -> dict[str, Any]:
        """See `training.Task`."""
        return {
            "task": self.name,
            "settings": as_dict(self.settings),
            "seed": self.seed,
            "vocabulary": self.words(),
            "fingerprint": self.data.fingerprint(),
        }

    def words(self) -> Any:
        """JSON: the words, or other symbols, that the model's ids stand for."""
        return self.data.vocabulary.words

    def start_epoch(self, epoch: int, part: int = 0, parts: int = 1) -> Any:
        """The batches of an epoch in its random order; see `training.Task`."""
        return self.batches("train", f"{self.seed}/{epoch}").shared(part, parts)

    def loss(self, batch: Any) -> Step:
        """The Step of a batch, which is moved to the model's device first."""
        objective, loss = self._loss(self.on_device(batch))
        return Step(objective, loss, batch.items)

    def on_device(self, batch: Any) -> Any:
        """The batch, a NamedTuple, with its tensors on the model's device."""
        moved = {
            name: t.to(self.device, non_blocking=True)
            for name, t in batch._asdict().items()
            if isinstance(t, torch.Tensor)
        }
        return batch._replace(**moved)

    def validate(self) -> dict[str, Any]:
        """The metrics of the validation split."""
        return self.evaluate("valid")

    def evaluate(self, split: str) -> dict[str, Any]:
        """The metrics of a split. The model must be in eval mode."""
        totals: dict = {}
        with torch.no_grad():
            for batch in watched(self.batches(split), f"evaluating {split}"):
                for name, value in self._score(self.on_device(batch)).items():
                    # A tensor stays on its device, so that no batch waits for the device.
                    value = torch.as_tensor(value, dtype=torch.float64)
                    totals[name] = totals.get(name, 0) + value
        return self._metrics({name: float(value) for name, value in totals.items()})

    def state_dict(self) -> dict[str, Any]:
        """The state between batches: none, as the batches are independent."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores what `state_dict` returned."""
        return


def perplexity(loss: float) -> float:
    """exp(loss), of a loss in nats; finite also where the loss is very large."""
    return math.exp(min(loss, 700.0))


def same_data(description: dict | None, data: Any, source: str | None, name: str) -> None:
    """Checks that `data` is what a checkpoint was trained on.

    description: of the checkpoint, or None    source: as for `locate.described`, for the message
    Errors: ValueError where the fingerprints differ
    """
    if description is None:
        return
    wanted, found = description["fingerprint"], data.fingerprint()
    if found != wanted:
        raise ValueError(
            f"{name}: --data must be the data that the checkpoint was trained on, with checksum "
            f"{wanted:08x}, got {described(source)}, with checksum {found:08x}"
        )


def at_least_one(section: Any, *names: str) -> None:
    """Raises ValueError where a setting of the section `data` is below 1; None is allowed."""
    for name in names:
        if getattr(section, name) is not None and getattr(section, name) < 1:
            raise ValueError(f"data.{name} must be at least 1, got {getattr(section, name)}")
