"""Sentence pairs of two languages as ids: vocabularies, splits and batches."""

import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import compress
from typing import NamedTuple

import torch
from torch import Tensor

from fusedseq.data import PAD, SPLITS
from fusedseq.data.length_batching import by_length, padding
from fusedseq.data.row_batches import RowBatches
from fusedseq.data.statistics import Side
from fusedseq.data.vocabulary import Vocabulary

# The ids of the special words after PAD, in every vocabulary, whatever their spelling.
UNKNOWN, START, END = range(PAD + 1, 4)

TextPair = tuple[str, str]  # a source and a target sentence
SplitPairs = dict[str, list[TextPair]]  # the pairs of each split


@dataclass(frozen=True)
class Language:
    """A language: how a sentence is split into words, and their ids.

    vocabulary: begins with the words for padding, unknown words, the start and the end
    tokenize: splits a sentence into a list of words
    """

    name: str
    vocabulary: Vocabulary
    tokenize: Callable[[str], list[str]]

    @property
    def specials(self) -> list[str]:
        """The special words, in the order of their ids."""
        return self.vocabulary.words[: END + 1]

    def encode(self, words: Sequence[str], max_length: int | None = None) -> list[int]:
        """Returns the ids of a sentence between START and END.

        max_length: the largest number of ids; later words of a longer sentence are cut off
        """
        words = words if max_length is None else words[: max_length - 2]
        ids = self.vocabulary.ids
        return [START, *(ids.get(word, UNKNOWN) for word in words), END]

    def decode(self, ids: Iterable[int]) -> list[str]:
        """Returns the words before END, without START and padding."""
        words = []
        for i in ids:
            if i == END:
                break
            if i not in (PAD, START):
                words.append(self.vocabulary.words[i])
        return words


class Pairs(NamedTuple):
    """The pairs of a split as text, as words and as ids; each list has one entry per pair."""

    text: list[TextPair]
    source_words: list[list[str]]
    target_words: list[list[str]]
    source: list[list[int]]
    target: list[list[int]]


class PairBatch(NamedTuple):
    """A batch of pairs."""

    source: Tensor  # (B, S) int64, START ... END, then PAD
    source_lengths: Tensor  # (B,) int64
    target: Tensor  # (B, T): a decoder reads target[:, :-1] and predicts target[:, 1:]
    target_lengths: Tensor  # (B,)
    pairs: list[int]  # their numbers in the split
    items: int  # the number of predicted words


class PairBatches(RowBatches):
    """The batches of one pass over a split, of about equal length.

    They are determined by (pairs, batch, key); see `by_length`.
    """

    def __init__(self, pairs: Pairs, batch: int, key: str | None = None) -> None:
        self.pairs = pairs
        self.lengths = [(len(t), len(s)) for s, t in zip(pairs.source, pairs.target, strict=True)]
        self.numbers = by_length(self.lengths, batch, key)

    def __len__(self) -> int:
        return len(self.numbers)

    def rows(self, i: int) -> list[int]:
        return self.numbers[i]

    def batch_of(self, rows: Sequence[int]) -> PairBatch:
        source, source_lengths = padded([self.pairs.source[n] for n in rows])
        target, target_lengths = padded([self.pairs.target[n] for n in rows])
        items = int(target_lengths.sum()) - len(rows)  # START is not predicted
        return PairBatch(source, source_lengths, target, target_lengths, list(rows), items)

    def padding(self) -> tuple[float, float]:
        """Returns the fraction of padding in the source ids and in the target ids."""
        target, source = (
            padding([pair[side] for pair in self.lengths], self.numbers) for side in (0, 1)
        )
        return source, target


def padded(rows: Sequence[list[int]]) -> tuple[Tensor, Tensor]:
    """Returns lists of ids as one tensor (B, L), padded with PAD, and their lengths (B,)."""
    lengths = torch.tensor([len(row) for row in rows], dtype=torch.int64)
    longest = int(lengths.max())
    ids = torch.tensor([row + [PAD] * (longest - len(row)) for row in rows], dtype=torch.int64)
    return ids, lengths


@dataclass(frozen=True)
class ParallelCorpus:
    """Two languages and the pairs of each split."""

    source: Language
    target: Language
    train: Pairs
    valid: Pairs
    test: Pairs
    dropped: dict[str, int]  # for each reason how many pairs of the files are in no split

    def sides(self) -> list[Side]:
        """Returns the sentences of both languages, for the statistics."""
        return [
            Side(
                language.name,
                language.vocabulary,
                {split: getattr(getattr(self, split), words) for split in SPLITS},
            )
            for language, words in ((self.source, "source_words"), (self.target, "target_words"))
        ]

    def fingerprint(self) -> int:
        """Returns a checksum of words and ids: a run cannot be resumed on other data."""
        crc = 0
        for part in (
            self.source.vocabulary.words,
            self.target.vocabulary.words,
            *(ids for split in SPLITS for ids in getattr(self, split)[3:]),
        ):
            crc = zlib.crc32(repr(part).encode(), crc)
        return crc


def build(
    splits: Mapping[str, list[TextPair]],
    names: Sequence[str],
    tokenize: Callable[[str], list[str]],
    count: Callable[[list[list[str]]], Vocabulary],
    *,
    max_length: int,
    dropped: Mapping[str, int] | None = None,
) -> ParallelCorpus:
    """Builds a ParallelCorpus.

    splits: the pairs (source, target) of train, valid and test    names: of the two languages
    tokenize: splits a sentence into words
    count: returns the Vocabulary of a list of sentences, each a list of words, beginning with the
        four special words
    max_length: of a sentence in ids, counting START and END. Longer training pairs are dropped. The
        ids of longer sentences in the other splits are cut off, but their text and words are whole,
        because metrics are computed on whole sentences
    dropped: for each reason how many pairs were dropped before
    Errors: ValueError for an empty split or a max_length that leaves no training pair.
    """
    if max_length < 3:
        raise ValueError(f"max_length must be at least 3, got {max_length}")
    for split in SPLITS:
        if not splits[split]:
            raise ValueError(_without_pairs(split, dropped or {}))
    words = {split: [(tokenize(s), tokenize(t)) for s, t in splits[split]] for split in SPLITS}
    short_enough = [max(map(len, pair)) + 2 <= max_length for pair in words["train"]]
    if not any(short_enough):
        raise ValueError(f"max_length must leave a training pair, got {max_length}")
    text = {**splits, "train": list(compress(splits["train"], short_enough))}
    words["train"] = list(compress(words["train"], short_enough))
    source, target = (
        Language(name, count([pair[side] for pair in words["train"]]), tokenize)
        for side, name in enumerate(names)
    )
    train, valid, test = (
        _pairs(text[split], words[split], source, target, max_length) for split in SPLITS
    )
    dropped = {**(dropped or {}), "too long": short_enough.count(False)}
    dropped = {why: n for why, n in dropped.items() if n}
    return ParallelCorpus(source, target, train, valid, test, dropped)


def _without_pairs(split: str, dropped: Mapping[str, int]) -> str:
    """Returns a message about a split without pairs."""
    reasons = [f"{n} {why}" for why, n in dropped.items() if n]
    after = f" after dropping {', '.join(reasons)}" if reasons else ""
    return f"{split} must have at least 1 pair, got 0{after}"


def _pairs(
    text: list[TextPair],
    words: list[tuple[list[str], list[str]]],
    source: Language,
    target: Language,
    max_length: int,
) -> Pairs:
    return Pairs(
        text,
        source_words=[pair[0] for pair in words],
        target_words=[pair[1] for pair in words],
        source=[source.encode(pair[0], max_length) for pair in words],
        target=[target.encode(pair[1], max_length) for pair in words],
    )
