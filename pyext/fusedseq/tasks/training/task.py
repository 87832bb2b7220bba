"""What a task provides to the Trainer."""

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import torch


class Step(NamedTuple):
    """What a task computes from one batch."""

    objective: torch.Tensor  # scalar: the value to minimize, regularization terms included
    loss: torch.Tensor  # scalar: the value to report, without regularization terms
    items: int  # number of items both are a mean over: the weight of this batch within a step
    lr_scale: float = 1.0  # factor on the learning rate of a step that has this batch


class Task(Protocol):
    """A model together with its data, as the Trainer uses it.

    model: the network, already on its device
    unit: the plural noun for what `Step.items` counts, e.g. "tokens"
    packages: optional, {Python package: what a run lacks without it}
    """

    model: torch.nn.Module
    unit: str

    def description(self) -> dict[str, Any]:
        """JSON that describes what the model was built from; it is stored in every checkpoint."""

    def start_epoch(self, epoch: int, part: int = 0, parts: int = 1) -> Sequence[Any]:
        """Starts an epoch and returns its batches.

        The batches are computed on access and are a pure function of `epoch` and of the carried
        state (see `state_dict`), so that a resumed run can continue at any index. State that
        belongs to one epoch is reset here. With several processes, process `part` of `parts`
        receives its part of every batch.
        """

    def loss(self, batch: Any) -> Step:
        """The objective and the loss of one batch, as means over its items."""

    def validate(self) -> dict[str, float]:
        """The validation metrics; "loss" is the one to minimize."""

    def state_dict(self) -> dict[str, Any]:
        """The state that is carried from batch to batch outside the model."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores what `state_dict` returned."""
