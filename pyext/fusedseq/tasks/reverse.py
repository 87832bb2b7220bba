"""The reversal of a sequence of numbers by a Transformer's encoder: the rows reverse/... of the documented systems."""

from dataclasses import dataclass, field, replace

from fusedseq.data import reverse
from fusedseq.models.reversal import Reversal, ReversalSettings
from fusedseq.tasks.independent import IndependentBatches, at_least_one, same_data
from fusedseq.tasks.training import TrainingSettings, from_dict


@dataclass(frozen=True)
class SequenceSettings:
    batch: int = 8
    eval_batch: int = 512
    numbers: int = 9  # that a sequence may have: 1 .. numbers
    sizes: tuple[int, ...] = (4, 20, 100, 400, 5000)  # sequences drawn of length 1, 2, ...; duplicates are dropped
    limit: int | None = reverse.LEFT  # sequences that are kept

    def __post_init__(self):
        at_least_one(self, "batch", "eval_batch", "numbers")


@dataclass(frozen=True)
class Settings:
    model: ReversalSettings = field(default_factory=ReversalSettings)
    data: SequenceSettings = field(default_factory=SequenceSettings)
    training: TrainingSettings = field(
        default_factory=lambda: TrainingSettings(epochs=20, optimizer="adam", lr=1e-5, log_steps=25)
    )


BASE = Settings()
# The document: embed 512, 8 heads, 1 layer, ff 2048, dropout .1, no mask; Adam, lr 1e-5, batch 8, 20 epochs.
PRESETS = {
    "base": BASE,
    "tuned": replace(
        BASE, model=ReversalSettings(embedding=1024, heads=2, layers=8, feedforward=4096, dropout=0.3)
    ),  # its study's best
}
DEFAULT_PRESET = "base"
# What the document's study searches.
SPACE = {
    "model.embedding": (256, 512, 1024, 2048),
    "model.heads": (1, 2, 4, 8),
    "model.layers": (1, 2, 4, 8),
    "model.feedforward": (512, 1024, 2048, 4096),
    "model.dropout": (0.0, 0.1, 0.2, 0.3, 0.4, 0.5),
    "model.mask": (True, False),
}


class Task(IndependentBatches):
    """What `Trainer` trains, on Reversals. Accuracies count padding, as the document's do (17,475 numbers in 3,495 sequences), where it is trained."""

    name, unit = "reverse", "numbers"

    def batches(self, split, key=None):
        data = self.settings.data
        return reverse.ReversalBatches(getattr(self.data, split), data.batch if key else data.eval_batch, key)

    def _loss(self, batch):
        loss = self.model.cross_entropy(self.model(batch.source, batch.lengths), batch.target)
        return loss, loss

    def _score(self, batch):
        y = self.model(batch.source, batch.lengths)
        loss, _, _, found = self.model.cross_entropy(y, batch.target, "none", return_details=True)
        counts = found >= 0  # not the padding, where that is no target
        right = found == batch.target
        return {"loss": loss.sum(), "right": right.sum(), "whole": (right | ~counts).all(1).sum(), "numbers": counts.sum(),
                "sequences": len(right)}  # fmt: skip

    def _figures(self, sums):
        return {
            "loss": sums["loss"] / sums["numbers"], "token_accuracy": sums["right"] / sums["numbers"],
            "sequence_accuracy": sums["whole"] / sums["sequences"], "numbers": int(sums["numbers"]),
        }  # fmt: skip


def build(settings, data, *, ops, seed, device="cpu", description=None):
    """As ptb.build; the data are generated, from the seed: `data` is None or 'synthetic'."""
    sizes = dict(enumerate(settings.data.sizes, 1))
    loaded = reverse.load(
        data, seed=seed, sizes=sizes, max_length=len(sizes), numbers=settings.data.numbers, limit=settings.data.limit
    )
    same_data(description, loaded, data, "reverse")
    return Task(settings, loaded, Reversal(len(loaded.vocabulary), settings.model, ops=ops), seed=seed, device=device)


def restore(description, *, ops):
    """As ptb.restore."""
    settings = from_dict(Settings, description["settings"])
    return Reversal(len(description["vocabulary"]), settings.model, ops=ops)
