"""Domain adaptation by pseudo-labels: a model says what it takes for the missing words of the other domain, and learns from
that (Lee, 2013, "Pseudo-Label"; Yarowsky, 1995, for words)."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch

LABELS, WHEN, SELECT = ("none", "model", "true"), ("before", "after"), ("general", "news")


@dataclass(frozen=True)
class AdaptationSettings:
    """What a run learns from the other domain's training text, the news."""

    labels: str = (
        "none"  # of its contexts: "model", the model's own; "true", the words themselves; "none": not learnt from
    )
    when: str = "before"  # each epoch the model labels them, or "after" it, for the next: the first has none then
    keep: bool = (
        False  # the labels of earlier epochs too: their contexts are learnt once for each time they were labelled
    )
    confidence: float = 0.0  # the least probability of a model's label; contexts of less are left out of the epoch
    general: bool = True  # the general text is learnt as well
    select: str = "general"  # or "news": the domain whose validation loss says which weights are the best

    def __post_init__(self):
        for name, known in (("labels", LABELS), ("when", WHEN), ("select", SELECT)):
            if getattr(self, name) not in known:
                raise ValueError(f"adaptation.{name} must be one of {', '.join(known)}, got {getattr(self, name)!r}")
        if not 0 <= self.confidence < 1:
            raise ValueError(f"adaptation.confidence must be in [0, 1), got {self.confidence}")
        if not self.general and (self.labels == "none" or (self.labels, self.when) == ("model", "after")):
            raise ValueError("adaptation.general must be true where an epoch has no other labels, got False with "
                             f"labels {self.labels}, when {self.when}")  # fmt: skip


class PseudoLabels:
    """A model's labels for unlabelled contexts, made anew for each epoch.

    They are part of a run's state: within an epoch they are not what the model would say by now.
    settings: an AdaptationSettings    label: function of no argument -> (n,) int64, below 0 where there is none
    """

    def __init__(self, settings, label):
        self.settings, self.label = settings, label
        self.epoch, self.labels = -1, []  # the epoch that the labels are for; (n,) int32 each

    def of(self, epoch):
        """The labels to learn in an epoch, one (n,) for each time they were made; called before its first step."""
        first = 1 if self.settings.when == "after" else 0
        if epoch > self.epoch and epoch >= first:
            earlier = self.labels if self.settings.keep else []
            self.epoch, self.labels = epoch, [*earlier, self.label().to("cpu", torch.int32)]
        return self.labels

    def state_dict(self):
        return {"epoch": self.epoch, "labels": self.labels}

    def load_state_dict(self, state):
        self.epoch, self.labels = state["epoch"], list(state["labels"])


def label(model, batches, confidence=0.0):
    """What a WordPredictor takes for the middle words: (n,) int64 on its device, -1 where its probability is below `confidence`.

    batches: ContextBatches in the order of the contexts, whose targets are not looked at
    Without dropout, without logits in memory, and with the same weights always the same.
    """
    weight, training = model.output_weight, model.training
    model.eval()
    try:
        with torch.no_grad():
            return torch.cat([_label(model, batch.context.to(weight.device), confidence) for batch in batches])
    finally:
        model.train(training)


def _label(model, context, confidence):
    y = model(context)  # (B, E)
    _, _, lse, found = model.cross_entropy(y, context.new_zeros(len(context)), "none", return_details=True)
    if not confidence:
        return found
    log_p = (y * model.output_weight[found]).sum(-1) - lse
    return torch.where(log_p.exp() >= confidence, found, -1)


class MadeWhenAsked(Sequence):
    """A sequence that is made when it is first asked for anything: after a resumed run's labels were loaded."""

    def __init__(self, make):
        self._make = make

    @cached_property
    def _made(self):
        return self._make()

    def __len__(self):
        return len(self._made)

    def __getitem__(self, i):
        return self._made[i]
