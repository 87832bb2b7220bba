"""Reverses a sequence of numbers with a Transformer encoder: the experiments reverse/..."""

from dataclasses import dataclass, field, replace
from types import ModuleType
from typing import Any

import torch

from fusedseq.data import reverse
from fusedseq.models.reversal import Reversal, ReversalSettings
from fusedseq.tasks.training import TrainingSettings, from_dict
from fusedseq.tasks.training.independent_batches import IndependentBatches, at_least_one, same_data


@dataclass(frozen=True)
class SequenceSettings:
    """The data: random sequences of numbers."""

    # Sequences in a training batch.
    batch: int = 8
    # Sequences in a batch of validation and test.
    eval_batch: int = 512
    # A sequence consists of the numbers 1 .. numbers.
    numbers: int = 9
    # How many sequences of length 1, 2, ... are drawn, none below 0; duplicates are dropped.
    sizes: tuple[int, ...] = (4, 20, 100, 400, 5000)
    # The largest number of sequences, drawn at random from the distinct ones; None retains all.
    limit: int | None = reverse.LIMIT

    def __post_init__(self) -> None:
        at_least_one(self, "batch", "eval_batch", "numbers", "limit")
        if not self.sizes or min(self.sizes) < 0:
            raise ValueError(
                f"data.sizes must have at least one number, none below 0, got {self.sizes}"
            )


@dataclass(frozen=True)
class Settings:
    """The settings of a run of reverse."""

    model: ReversalSettings = field(default_factory=ReversalSettings)
    data: SequenceSettings = field(default_factory=SequenceSettings)
    training: TrainingSettings = field(
        default_factory=lambda: TrainingSettings(epochs=20, optimizer="adam", lr=1e-5, log_steps=25)
    )


BASE = Settings()
# The source report sequence_reversal specifies embed 512, 8 heads, 1 layer, feed-forward 2048,
# dropout .1, no mask; Adam, lr 1e-5, batch 8, 20 epochs. "tuned" is the best model of its study.
PRESETS = {
    "base": BASE,
    "tuned": replace(
        BASE,
        model=ReversalSettings(embedding=1024, heads=2, layers=8, feedforward=4096, dropout=0.3),
    ),
}
DEFAULT_PRESET = "base"
# The search space of the report's study.
SPACE = {
    "model.embedding": (256, 512, 1024, 2048),
    "model.heads": (1, 2, 4, 8),
    "model.layers": (1, 2, 4, 8),
    "model.feedforward": (512, 1024, 2048, 4096),
    "model.dropout": (0.0, 0.1, 0.2, 0.3, 0.4, 0.5),
    "model.mask": (True, False),
}


class Task(IndependentBatches):
    """What `Trainer` trains, on Reversals.

    Accuracies count padding where padding is trained, as those of the source report do (17,475
    numbers in 3,495 sequences).
    """

    name, unit = "reverse", "numbers"

    def batches(self, split: str, key: str | None = None) -> reverse.ReversalBatches:
        """See IndependentBatches."""
        data = self.settings.data
        return reverse.ReversalBatches(
            getattr(self.data, split),
            data.batch if key else data.eval_batch,
            key,
            count_padding=self.settings.model.train_padding,
        )

    def _loss(self, batch: Any) -> tuple[torch.Tensor, torch.Tensor]:
        loss = self.model.cross_entropy(self.model(batch.source, batch.lengths), batch.target)
        return loss, loss

    def _score(self, batch: Any) -> dict:
        y = self.model(batch.source, batch.lengths)
        loss, _, _, best = self.model.cross_entropy(y, batch.target, "none", return_details=True)
        counts = best >= 0  # false for padding that is not a target
        right = best == batch.target
        return {
            "loss": loss.sum(),
            "right": right.sum(),
            "whole": (right | ~counts).all(1).sum(),
            "numbers": counts.sum(),
            "sequences": len(right),
        }

    def _metrics(self, sums: dict) -> dict[str, Any]:
        return {
            "loss": sums["loss"] / sums["numbers"],
            "token_accuracy": sums["right"] / sums["numbers"],
            "sequence_accuracy": sums["whole"] / sums["sequences"],
            "numbers": int(sums["numbers"]),
        }


def build(
    settings: Settings,
    data: str | None,
    *,
    ops: ModuleType,
    seed: int,
    device: torch.device | str = "cpu",
    description: dict | None = None,
) -> Task:
    """The task; see ptb.build. The data are generated from the seed.

    data: None or 'synthetic'
    """
    sizes = dict(enumerate(settings.data.sizes, 1))
    loaded = reverse.load(
        data,
        seed=seed,
        sizes=sizes,
        max_length=len(sizes),
        numbers=settings.data.numbers,
        limit=settings.data.limit,
    )
    same_data(description, loaded, "synthetic", "reverse")
    model = Reversal(len(loaded.vocabulary), settings.model, ops=ops)
    return Task(settings, loaded, model, seed=seed, device=device)


def restore(description: dict[str, Any], *, ops: ModuleType) -> Reversal:
    """The model of a checkpoint's description; see ptb.restore."""
    settings = from_dict(Settings, description["settings"])
    return Reversal(len(description["vocabulary"]), settings.model, ops=ops)
