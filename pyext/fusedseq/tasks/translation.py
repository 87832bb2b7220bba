"""Translation by an encoder-decoder Transformer: what en-es and en-fr share."""

from dataclasses import dataclass, field

from fusedseq.data import en_es, en_fr
from fusedseq.data.parallel import Language, PairBatches
from fusedseq.data.vocabulary import Vocabulary
from fusedseq.models.translator import Translator, TranslatorSettings
from fusedseq.tasks.independent import IndependentBatches, at_least_one, perplexity, same_data
from fusedseq.tasks.training import TrainingSettings, from_dict
from fusedseq.tasks.translated import greedy_figures


@dataclass(frozen=True)
class PairSettings:
    batch: int = 64
    eval_batch: int = 64
    max_length: int = 90  # ids in a sentence, its start and end counted; longer training pairs are dropped
    min_frequency: int = 2  # of a word in the training split, to be in the vocabulary

    def __post_init__(self):
        at_least_one(self, "batch", "eval_batch", "min_frequency")


@dataclass(frozen=True)
class Settings:
    model: TranslatorSettings = field(default_factory=TranslatorSettings)
    data: PairSettings = field(default_factory=PairSettings)
    training: TrainingSettings = field(default_factory=TrainingSettings)


SOURCES = {"en-es": en_es, "en-fr": en_fr}


class Task(IndependentBatches):
    """What `Trainer` trains, on a ParallelCorpus. Accuracy is that of the next word after the reference's words."""

    unit = "words"

    def __init__(self, name, settings, data, *, ops, seed, device="cpu"):
        self.name = name
        model = Translator(len(data.source.vocabulary), len(data.target.vocabulary), settings.model, ops=ops)
        super().__init__(settings, data, model, seed=seed, device=device)

    def words(self):
        return {"source": self.data.source.vocabulary.words, "target": self.data.target.vocabulary.words}

    def batches(self, split, key=None):
        data = self.settings.data
        return PairBatches(getattr(self.data, split), data.batch if key else data.eval_batch, key)

    def _read(self, batch):
        return self.model(batch.source, batch.source_lengths, batch.target[:, :-1])

    def _loss(self, batch):
        loss = self.model.cross_entropy(self._read(batch), batch.target[:, 1:])
        return loss, loss

    def _score(self, batch):
        target = batch.target[:, 1:]
        loss, _, _, found = self.model.cross_entropy(self._read(batch), target, "none", return_details=True)
        return {"loss": loss.sum(), "right": (found == target).sum(), "words": batch.items}

    def _figures(self, sums):
        loss = sums["loss"] / sums["words"]
        return {"loss": loss, "perplexity": perplexity(loss), "accuracy": sums["right"] / sums["words"],
                "words": int(sums["words"])}  # fmt: skip

    def more_figures(self, split, out):
        """What takes longer than `evaluate`, for the end of a run: BLEU. out: the run's directory, for a table"""
        return greedy_figures(self, split, out)


def build(name, settings, data, *, ops, seed, device="cpu", description=None):
    """The task from a data directory (or 'synthetic'). name: en-es or en-fr    the rest as ptb.build"""
    loaded = SOURCES[name].load(
        data, seed=seed, max_length=settings.data.max_length, min_frequency=settings.data.min_frequency
    )
    same_data(description, loaded, data, name)
    return Task(name, settings, loaded, ops=ops, seed=seed, device=device)


def restore(description, *, ops):
    """The model that a checkpoint's description tells of, its weights still random."""
    settings, words = from_dict(Settings, description["settings"]), description["vocabulary"]
    return Translator(len(words["source"]), len(words["target"]), settings.model, ops=ops)


def languages(description):
    """The source and the target Language of a checkpoint's description."""
    source, words = SOURCES[description["task"]], description["vocabulary"]
    return tuple(Language(name, Vocabulary(words[side]), source.tokenize)
                 for name, side in zip(source.LANGUAGES, ("source", "target"), strict=True))  # fmt: skip
