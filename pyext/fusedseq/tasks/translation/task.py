"""Translation with an encoder-decoder Transformer: what en-es and en-fr share."""

from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any, ClassVar

import torch

from fusedseq.data import en_es, en_fr
from fusedseq.data.parallel import Language, PairBatches
from fusedseq.data.vocabulary import Vocabulary
from fusedseq.models.translator import Translator, TranslatorSettings
from fusedseq.tasks.training import TrainingSettings, from_dict
from fusedseq.tasks.training.independent_batches import (
    IndependentBatches,
    at_least_one,
    perplexity,
    same_data,
)
from fusedseq.tasks.translation.scoring import greedy_metrics


@dataclass(frozen=True)
class PairSettings:
    """The data: pairs of sentences."""

    # Pairs in a training batch.
    batch: int = 64
    # Pairs in a batch of validation and test.
    eval_batch: int = 64
    # The most ids in a sentence, its start and end included, at least 3; longer training pairs are
    # dropped, and longer sentences of the other splits are cut off.
    max_length: int = 90
    # The lowest frequency, in the training split, of a word in the vocabulary.
    min_frequency: int = 2
    # Seeds the split of the pairs of en-es where the data have none, and synthetic pairs. It is
    # separate from the run's seed so that runs with different seeds can be compared.
    split_seed: int = 0

    def __post_init__(self) -> None:
        at_least_one(self, "batch", "eval_batch", "min_frequency")
        if self.max_length < 3:
            raise ValueError(
                "data.max_length must be at least 3, a word between the start and the end, got "
                f"{self.max_length}"
            )


@dataclass(frozen=True)
class Settings:
    """The settings of a run of en-es or en-fr."""

    model: TranslatorSettings = field(default_factory=TranslatorSettings)
    data: PairSettings = field(default_factory=PairSettings)
    training: TrainingSettings = field(default_factory=TrainingSettings)


SOURCES: dict[str, ModuleType] = {"en-es": en_es, "en-fr": en_fr}


def check_lengths(settings: Settings) -> None:
    """Raises ValueError where learned positions are fewer than the ids of a sentence.

    Checkpoints with such settings exist, so that this is not a check of `Settings`.
    """
    model, longest = settings.model, settings.data.max_length
    if model.positions == "learned" and longest > model.max_length:
        raise ValueError(
            f"data.max_length must be at most model.max_length = {model.max_length}, because the "
            f"positions are learned, got {longest}"
        )


class Task(IndependentBatches):
    """What `Trainer` trains, on a ParallelCorpus.

    The accuracy is that of the next word after the words of the reference.
    """

    unit = "words"
    packages: ClassVar = {"nltk": "no BLEU", "sacrebleu": "no BLEU"}  # see `training.Task`

    def __init__(
        self,
        name: str,
        settings: Settings,
        data: Any,
        *,
        ops: ModuleType,
        seed: int,
        device: torch.device | str = "cpu",
    ) -> None:
        self.name = name
        model = Translator(
            len(data.source.vocabulary), len(data.target.vocabulary), settings.model, ops=ops
        )
        super().__init__(settings, data, model, seed=seed, device=device)

    def words(self) -> dict[str, Any]:
        """The words of both vocabularies."""
        return {
            "source": self.data.source.vocabulary.words,
            "target": self.data.target.vocabulary.words,
        }

    def batches(self, split: str, key: str | None = None) -> PairBatches:
        """See IndependentBatches."""
        data = self.settings.data
        return PairBatches(getattr(self.data, split), data.batch if key else data.eval_batch, key)

    def _decoded(self, batch: Any) -> torch.Tensor:
        """The decoder's output where it reads the reference: (B, L, E)."""
        return self.model(batch.source, batch.source_lengths, batch.target[:, :-1])

    def _loss(self, batch: Any) -> tuple[torch.Tensor, torch.Tensor]:
        loss = self.model.cross_entropy(self._decoded(batch), batch.target[:, 1:])
        return loss, loss

    def _score(self, batch: Any) -> dict:
        target = batch.target[:, 1:]
        loss, _, _, best = self.model.cross_entropy(
            self._decoded(batch), target, "none", return_details=True
        )
        return {"loss": loss.sum(), "right": (best == target).sum(), "words": batch.items}

    def _metrics(self, sums: dict) -> dict[str, Any]:
        loss = sums["loss"] / sums["words"]
        return {
            "loss": loss,
            "perplexity": perplexity(loss),
            "accuracy": sums["right"] / sums["words"],
            "words": int(sums["words"]),
        }

    def more_metrics(self, split: str, out: str | Path) -> dict[str, Any]:
        """BLEU, which takes longer than `evaluate` and is computed at the end of a run.

        out: the run's directory, for the table of sentences
        """
        return greedy_metrics(self, split, out)


def build(
    name: str,
    settings: Settings,
    data: str | None,
    *,
    ops: ModuleType,
    seed: int,
    device: torch.device | str = "cpu",
    description: dict | None = None,
) -> Task:
    """The task; see ptb.build. name: en-es or en-fr"""
    if description is None:
        check_lengths(settings)
    loaded = SOURCES[name].load(
        data,
        seed=settings.data.split_seed,
        max_length=settings.data.max_length,
        min_frequency=settings.data.min_frequency,
    )
    same_data(description, loaded, data, name)
    return Task(name, settings, loaded, ops=ops, seed=seed, device=device)


def restore(description: dict[str, Any], *, ops: ModuleType) -> Translator:
    """The model of a checkpoint's description; see ptb.restore."""
    settings, words = from_dict(Settings, description["settings"]), description["vocabulary"]
    return Translator(len(words["source"]), len(words["target"]), settings.model, ops=ops)


def languages(description: dict[str, Any]) -> tuple[Language, ...]:
    """The source and the target Language of a checkpoint's description."""
    source, words = SOURCES[description["task"]], description["vocabulary"]
    return tuple(
        Language(name, Vocabulary(words[side]), source.tokenize)
        for name, side in zip(source.LANGUAGES, ("source", "target"), strict=True)
    )
