"""Domain adaptation by pseudo-labels.

A model predicts the missing words of the other domain and is trained on its own predictions (Lee,
2013, "Pseudo-Label"; Yarowsky, 1995, for words).
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from fusedseq.tasks.training.settings import one_of

LABELS, WHEN, SELECT = ("none", "model", "true"), ("before", "after"), ("general", "news")


@dataclass(frozen=True)
class AdaptationSettings:
    """How a run uses the training text of the other domain, news."""

    # The targets of news contexts: "model", the model's predictions; "true", the actual words;
    # "none" does not train on news.
    labels: str = "none"
    # When the model predicts its labels: "before" each epoch, or "after" it for the next epoch, in
    # which case the first epoch has none.
    when: str = "before"
    # Whether to train on the labels of earlier epochs as well: each context is then used once per
    # labelling.
    keep: bool = False
    # The lowest probability of a model's label, in [0, 1); contexts with less are left out of the
    # epoch.
    confidence: float = 0.0
    # Whether to train on the general text as well; it must be true where an epoch has no other
    # labels.
    general: bool = True
    # The domain, "general" or "news", whose validation loss selects the best weights.
    select: str = "general"

    def __post_init__(self) -> None:
        for name, known in (("labels", LABELS), ("when", WHEN), ("select", SELECT)):
            value = getattr(self, name)
            if value not in known:
                raise ValueError(f"adaptation.{name} must be {one_of(known)}, got {value!r}")
        if not 0 <= self.confidence < 1:
            raise ValueError(f"adaptation.confidence must be in [0, 1), got {self.confidence}")
        first_without = self.labels == "none" or (self.labels, self.when) == ("model", "after")
        if not self.general and first_without:
            raise ValueError(
                "adaptation.general must be true where an epoch has no other labels, got False "
                f"with labels {self.labels}, when {self.when}"
            )


class PseudoLabels:
    """A model's labels for unlabelled contexts, recomputed for each epoch.

    They are part of a run's state: during an epoch they differ from what the model would predict.
    settings: an AdaptationSettings
    label: a function without arguments that returns (n,) int64 labels, below 0 for no label
    """

    def __init__(self, settings: AdaptationSettings, label: Callable[[], torch.Tensor]) -> None:
        self.settings, self.label = settings, label
        self.epoch = -1  # the epoch that the labels belong to
        self.labels: list[torch.Tensor] = []  # (n,) int32 each

    def of(self, epoch: int) -> list[torch.Tensor]:
        """The labels to train on in an epoch, one (n,) per labelling.

        It is called before the first step of the epoch.
        """
        first = 1 if self.settings.when == "after" else 0
        if epoch > self.epoch and epoch >= first:
            earlier = self.labels if self.settings.keep else []
            self.epoch, self.labels = epoch, [*earlier, self.label().to("cpu", torch.int32)]
        return self.labels

    def state_dict(self) -> dict[str, Any]:
        """The state for a checkpoint."""
        return {"epoch": self.epoch, "labels": self.labels}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores what `state_dict` returned."""
        self.epoch, self.labels = state["epoch"], list(state["labels"])


def label(model: Any, batches: Iterable[Any], confidence: float = 0.0) -> torch.Tensor:
    """The most probable middle words of contexts, predicted without dropout.

    model: a WordPredictor
    batches: ContextBatches in the order of the contexts; their targets are not used
    confidence: contexts whose most probable word has less probability receive the label -1
    Returns (n,) int64 on the model's device. The result is deterministic, and the logits are never
    stored as a whole.
    """
    weight, training = model.output_weight, model.training
    model.eval()
    try:
        with torch.no_grad():
            return torch.cat(
                [_label(model, batch.context.to(weight.device), confidence) for batch in batches]
            )
    finally:
        model.train(training)


def _label(model: Any, context: torch.Tensor, confidence: float) -> torch.Tensor:
    y = model(context)  # (B, E)
    _, _, lse, best = model.cross_entropy(
        y, context.new_zeros(len(context)), "none", return_details=True
    )
    if not confidence:
        return best
    log_p = (y * model.output_weight[best]).sum(-1) - lse
    return torch.where(log_p.exp() >= confidence, best, -1)


class LazySequence(Sequence):
    """A sequence that is built on first access.

    An epoch's batches need it: the labels of a resumed run are loaded after `start_epoch`.
    """

    def __init__(self, build: Callable[[], Sequence]) -> None:
        self._build = build

    @cached_property
    def _built(self) -> Sequence:
        return self._build()

    def __len__(self) -> int:
        return len(self._built)

    def __getitem__(self, i: Any) -> Any:
        return self._built[i]
