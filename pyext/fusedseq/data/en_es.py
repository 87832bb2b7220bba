"""English-Spanish sentence pairs of Tatoeba (manythings.org/anki), with word-level tokenizers."""

import random
from collections.abc import Iterable, Sequence
from functools import cache, partial
from typing import Any

from fusedseq.data import SPLITS, synthetic_pairs
from fusedseq.data.locate import locate, named_data
from fusedseq.data.parallel import ParallelCorpus, SplitPairs, TextPair, build
from fusedseq.data.parallel_files import read_parallel, read_tabbed, without_gaps
from fusedseq.data.vocabulary import Vocabulary

LANGUAGES = "English", "Spanish"
SPECIALS = ("[PAD]", "[UNK]", "[SOS]", "[EOS]")
FOLDERS = ("tatoeba_en_es",)
# Each list is a complete set of files.
CHOICES = [["spa.txt"], ["pairs.tsv"]] + [
    [f"{split}.{side}" for split in ("train", name, "test") for side in ("en", "es")]
    for name in ("valid", "dev")
]


def load(
    data: str | None = None,
    *,
    seed: int = 0,
    held_out: float = 0.05,
    min_frequency: int = 2,
    max_length: int = 90,
) -> ParallelCorpus:
    """Loads the ParallelCorpus in `data`, a directory or 'synthetic'; None reads FUSEDSEQ_DATA.

    The files are spa.txt or pairs.tsv (English <tab> Spanish), which are split here, or train.en,
    train.es, valid.en and so on, which are already split.
    seed: of the split and of the synthetic pairs
    held_out: the fraction of English sentences in valid, and in test
    min_frequency: the least frequency of a word of the vocabulary in the training split
    max_length: of a sentence in ids
    Errors: FileNotFoundError, see `locate`; ValueError, which names the data, as `split_by_source`
        and `build`.
    """
    with named_data("en-es", data):
        splits, dropped = _split_pairs(data, seed, held_out)
        return build(
            splits,
            LANGUAGES,
            tokenize,
            partial(count, min_frequency=min_frequency),
            max_length=max_length,
            dropped={"empty": dropped},
        )


def _split_pairs(data: str | None, seed: int, held_out: float) -> tuple[SplitPairs, int]:
    """Returns the pairs of each split, and the number of pairs with an empty side."""
    if data == "synthetic":
        return split_by_source(synthetic_pairs.pairs("es", seed=seed), seed, held_out), 0
    files = locate("en-es", CHOICES, data, FOLDERS)
    if len(files) == 1:
        pairs, dropped = without_gaps(read_tabbed(files[0]))
        return split_by_source(pairs, seed, held_out), dropped
    read = [without_gaps(read_parallel(*files[i : i + 2])) for i in (0, 2, 4)]
    return {split: read[i][0] for i, split in enumerate(SPLITS)}, sum(n for _, n in read)


def split_by_source(pairs: Iterable[TextPair], seed: int | str, held_out: float) -> SplitPairs:
    """Splits pairs into train, valid and test by their English sentences.

    All pairs of an English sentence are in one split, also if its spellings differ in case or
    whitespace: otherwise a test sentence with another translation in train would be memorized.
    Errors: ValueError for a held_out outside (0, 0.5), and for too few sentences.
    """
    if not 0 < held_out < 0.5:
        raise ValueError(f"held_out must be between 0 and 0.5, got {held_out}")
    groups: dict[str, list[TextPair]] = {}
    for pair in pairs:
        groups.setdefault(" ".join(pair[0].casefold().split()), []).append(pair)
    keys = sorted(groups)  # so that the split does not depend on the order of the file
    random.Random(f"{seed}/split").shuffle(keys)
    size = round(len(keys) * held_out)
    if not size:
        raise ValueError(
            f"valid must have at least 1 pair, got 0: it is {held_out:.0%} of {len(keys)} "
            "different English sentences"
        )
    parts = {"valid": keys[:size], "test": keys[size : 2 * size], "train": keys[2 * size :]}
    return {split: [pair for key in parts[split] for pair in groups[key]] for split in SPLITS}


def tokenize(text: str) -> list[str]:
    """Returns runs of letters and digits, and runs of other characters except whitespace.

    Case is not changed.
    """
    return [word for word, _ in _whitespace().pre_tokenize_str(text)]


def count(sentences: Iterable[Sequence[str]], min_frequency: int = 2) -> Vocabulary:
    """Returns the Vocabulary of a word-level tokenizer of Hugging Face trained on sentences.

    Words are ordered by frequency, and alphabetically where frequencies are equal.
    sentences: lists of words
    """
    from tokenizers import Tokenizer, models, trainers

    tokenizer = Tokenizer(models.WordLevel(unk_token=SPECIALS[1]))
    tokenizer.pre_tokenizer = _whitespace()
    trainer = trainers.WordLevelTrainer(
        vocab_size=2**31,
        min_frequency=min_frequency,
        special_tokens=[*SPECIALS],
        show_progress=False,
    )
    tokenizer.train_from_iterator(map(" ".join, sentences), trainer)
    ids = tokenizer.get_vocab()
    return Vocabulary(sorted(ids, key=lambda word: int(ids[word])))


@cache
def _whitespace() -> Any:
    from tokenizers import pre_tokenizers

    return pre_tokenizers.Whitespace()
