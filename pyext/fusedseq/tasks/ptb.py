"""Word-level language modelling on the Penn Treebank: the experiments ptb/..."""

from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch

from fusedseq.data import SPLITS, corpus
from fusedseq.data.batching import Batches, batchify
from fusedseq.models.language_model import LanguageModel
from fusedseq.tasks.ptb_presets import BEGIN_WITH, DEFAULT_PRESET, PRESETS, Settings, StreamSettings
from fusedseq.tasks.training import Step, as_dict, from_dict
from fusedseq.tasks.training.independent_batches import perplexity, same_data
from fusedseq.tasks.training.progress import watched

__all__ = [
    "BEGIN_WITH",
    "DEFAULT_PRESET",
    "PRESETS",
    "Settings",
    "StreamSettings",
    "Task",
    "build",
    "detached",
    "metrics",
    "restore",
]


class Task:
    """What `Trainer` trains: a language model whose state is carried from segment to segment.

    settings: a Settings    corpus: a Corpus    ops: an operator set, see `catalog.operators`
    seed: of the segment lengths    device: where the model and the text are
    """

    unit, splits = "tokens", SPLITS

    def __init__(
        self,
        settings: Settings,
        corpus: corpus.Corpus,
        *,
        ops: ModuleType,
        seed: int,
        device: torch.device | str = "cpu",
    ) -> None:
        self.settings, self.corpus, self.seed = settings, corpus, seed
        self.device = torch.device(device)
        self.model: Any = LanguageModel(len(corpus.vocabulary), settings.model, ops=ops)
        self.model.to(self.device)
        self.inputs, self.targets = self._columns("train", settings.data.batch)
        self.state: tuple | None = None  # of the recurrent layers, detached

    def _columns(self, split: str, batch: int) -> list[torch.Tensor]:
        return [part.to(self.device) for part in batchify(getattr(self.corpus, split), batch)]

    def description(self) -> dict[str, Any]:
        """See `training.Task`."""
        return {
            "task": "ptb",
            "settings": as_dict(self.settings),
            "seed": self.seed,
            "vocabulary": self.corpus.vocabulary.words,
            "fingerprint": self.corpus.fingerprint(),
        }

    def start_epoch(self, epoch: int, part: int = 0, parts: int = 1) -> Batches:
        """The segments of an epoch; each of several processes reads some of the columns."""
        if parts > self.inputs.size(1):
            raise ValueError(
                f"data.batch must be at least the number of processes = {parts}, "
                f"got {self.inputs.size(1)}"
            )
        data, self.state = self.settings.data, None
        inputs, targets = (
            t.tensor_split(parts, dim=1)[part].contiguous() for t in (self.inputs, self.targets)
        )
        return Batches(
            inputs, targets, data.bptt, f"{self.seed}/{epoch}" if data.vary_bptt else None
        )

    def loss(self, batch: Any) -> Step:
        """The Step of a segment; the state of the recurrent layers is carried to the next one."""
        columns = batch.inputs.size(1)
        dropped, raw, state = self.model(batch.inputs, self._reset(self.state, columns))
        self.state = detached(state)
        reduction = "mean" if batch.items else "sum"  # a mean over no items would be nan
        loss = self.model.cross_entropy(dropped, batch.targets, reduction)
        objective = loss * (batch.items / columns) if self.settings.data.sum_over_time else loss
        objective = objective + self.model.regularization(dropped, raw)
        return Step(objective, loss, batch.items, batch.lr_scale)

    def _reset(self, state: tuple | None, columns: int) -> tuple | None:
        """Sets the state of random columns to zero; see StreamSettings.reset_probability."""
        p = self.settings.data.reset_probability
        if state is None or p == 0:
            return state
        keep = torch.rand(columns, 1, device=self.device) >= p  # (B, 1)
        return tuple(_map(lambda s: torch.where(keep, s, 0.0), part) for part in state)

    def validate(self) -> dict[str, Any]:
        """The metrics of the validation split."""
        return self.evaluate("valid")

    def batches(self, split: str, batch: int | None = None, bptt: int | None = None) -> Batches:
        """The segments of a split from its first to its last word.

        batch, bptt: columns and steps; by default those of the settings
        """
        data = self.settings.data
        inputs, targets = self._columns(
            split, batch or (data.test_batch if split == "test" else data.valid_batch)
        )
        return Batches(inputs, targets, bptt or data.bptt)

    def evaluate(self, split: str, temperature: float = 1.0) -> dict[str, Any]:
        """The mean cross-entropy of a split in nats, and its perplexity.

        The model must be in eval mode. temperature: the divisor of the logits
        """
        total, items, state = torch.zeros((), dtype=torch.float64, device=self.device), 0, None
        with torch.no_grad():
            for batch in watched(self.batches(split), f"evaluating {split}"):
                y, _, state = self.model(batch.inputs, state)
                total += self.model.cross_entropy(y, batch.targets, "sum", temperature)
                items += batch.items
        return metrics(total.item() / items, items)

    def state_dict(self) -> dict[str, Any]:
        """The state of the recurrent layers."""
        return {"state": self.state}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores what `state_dict` returned."""
        self.state = state["state"]
        if self.state is not None:
            self.state = tuple(_map(lambda s: s.to(self.device), part) for part in self.state)


def metrics(loss: float, items: int) -> dict[str, Any]:
    """The metrics of a split from its mean loss in nats."""
    return {"loss": loss, "perplexity": perplexity(loss), "tokens": items}


def detached(state: tuple) -> tuple:
    """The state of the recurrent layers without its autograd history."""
    return tuple(_map(lambda s: s.detach(), part) for part in state)


def _map(function: Callable[[torch.Tensor], torch.Tensor], part: Any) -> Any:
    """Applies `function` to h or c: one tensor for all layers, or a list where sizes differ."""
    return function(part) if isinstance(part, torch.Tensor) else [function(layer) for layer in part]


def build(
    settings: Settings,
    data: str | None,
    *,
    ops: ModuleType,
    seed: int,
    device: torch.device | str = "cpu",
    description: dict | None = None,
) -> Task:
    """The task from a data directory, or 'synthetic'; None reads $FUSEDSEQ_DATA.

    description: of a checkpoint that will be loaded, or None
    Errors: ValueError where the data are not those of the checkpoint; FileNotFoundError
    """
    loaded = corpus.load(data)
    same_data(description, loaded, data, "ptb")
    return Task(settings, loaded, ops=ops, seed=seed, device=device)


def restore(description: dict[str, Any], *, ops: ModuleType) -> LanguageModel:
    """The model of a checkpoint's description, with random weights; no data are needed."""
    settings = from_dict(Settings, description["settings"])
    return LanguageModel(len(description["vocabulary"]), settings.model, ops=ops)
