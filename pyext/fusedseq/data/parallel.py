"""Sentence pairs of two languages, as ids: vocabularies, splits and batches."""

import zlib
from collections.abc import Callable
from dataclasses import dataclass
from itertools import compress
from typing import NamedTuple

import torch

from fusedseq.data import PAD, SPLITS
from fusedseq.data.length_batching import by_length, padding
from fusedseq.data.row_batches import RowBatches
from fusedseq.data.statistics import Side
from fusedseq.data.vocabulary import Vocabulary

UNKNOWN, START, END = range(PAD + 1, 4)  # the ids of the other special words, whatever they are called


@dataclass(frozen=True)
class Language:
    """A language as the model sees it: how a sentence falls into words, and their ids.

    vocabulary: begins with the words for padding, the unknown, the start and the end of a sentence
    tokenize: from a string to a list of words
    """

    name: str
    vocabulary: Vocabulary
    tokenize: Callable

    @property
    def specials(self):
        return self.vocabulary.words[: END + 1]

    def encode(self, words, max_length=None):
        """The ids of a sentence between START and END, a list; of a longer one than `max_length` the first words."""
        words = words if max_length is None else words[: max_length - 2]
        ids = self.vocabulary.ids
        return [START, *(ids.get(word, UNKNOWN) for word in words), END]

    def decode(self, ids):
        """The words up to END, without START and padding."""
        words = []
        for i in ids:
            if i == END:
                break
            if i not in (PAD, START):
                words.append(self.vocabulary.words[i])
        return words


class Pairs(NamedTuple):
    """A split: its pairs as text, as words, and as ids; lists of one entry a pair, and of two within `text`."""

    text: list  # (source, target)
    source_words: list
    target_words: list
    source: list
    target: list


class PairBatch(NamedTuple):
    source: torch.Tensor  # (B, S) int64, START ... END, then PAD
    source_lengths: torch.Tensor  # (B,) int64
    target: torch.Tensor  # (B, T): a decoder reads target[:, :-1] and predicts target[:, 1:]
    target_lengths: torch.Tensor  # (B,)
    pairs: list  # their numbers in the split
    items: int  # words that are predicted


class PairBatches(RowBatches):
    """One pass over a split in batches of about equal length; a pure function of (pairs, batch, key)."""

    def __init__(self, pairs, batch, key=None):
        self.pairs = pairs
        self.lengths = [(len(t), len(s)) for s, t in zip(pairs.source, pairs.target, strict=True)]
        self.numbers = by_length(self.lengths, batch, key)

    def __len__(self):
        return len(self.numbers)

    def rows(self, i):
        return self.numbers[i]

    def batch_of(self, numbers):
        source, source_lengths = padded([self.pairs.source[n] for n in numbers])
        target, target_lengths = padded([self.pairs.target[n] for n in numbers])
        items = int(target_lengths.sum()) - len(numbers)
        return PairBatch(source, source_lengths, target, target_lengths, list(numbers), items)

    def padding(self):
        """The share of padding in the source and in the target ids."""
        return tuple(padding([pair[side] for pair in self.lengths], self.numbers) for side in (1, 0))


def padded(rows):
    """Lists of ids as one tensor (B, L), PAD after their ends, and their lengths (B,)."""
    lengths = torch.tensor([len(row) for row in rows], dtype=torch.int64)
    longest = int(lengths.max())
    return torch.tensor([row + [PAD] * (longest - len(row)) for row in rows], dtype=torch.int64), lengths


@dataclass(frozen=True)
class ParallelCorpus:
    source: Language
    target: Language
    train: Pairs
    valid: Pairs
    test: Pairs
    dropped: dict  # why a pair of the files is not in the splits: how many

    def sides(self):
        """What is in the splits, for the statistics."""
        return [Side(language.name, language.vocabulary, {split: getattr(getattr(self, split), words) for split in SPLITS})
                for language, words in ((self.source, "source_words"), (self.target, "target_words"))]  # fmt: skip

    def fingerprint(self):
        """One number for words and ids: a run is not resumed on other data than it began with."""
        crc = 0
        for part in (self.source.vocabulary.words, self.target.vocabulary.words,
                     *(ids for split in SPLITS for ids in getattr(self, split)[3:])):  # fmt: skip
            crc = zlib.crc32(repr(part).encode(), crc)
        return crc


def build(splits, names, tokenize, count, *, max_length, dropped=None):
    """A ParallelCorpus.

    splits: for each of train, valid and test its pairs of sentences, a list of (source, target)
    names: of the two languages    tokenize: from a sentence to its words
    count: from a list of sentences, each a list of words, to their Vocabulary, the four special words first
    max_length: ids in a sentence, START and END counted. Training pairs over it are dropped; of longer sentences in
        the other splits the ids end there, while their text and words are whole, for the figures are of the whole
    dropped: why pairs were left out before, and how many
    """
    if max_length < 3:
        raise ValueError(f"max_length must be at least 3, got {max_length}")
    for split in SPLITS:
        if not splits[split]:
            raise ValueError(f"{split} must have at least 1 pair, got 0")
    words = {split: [(tokenize(s), tokenize(t)) for s, t in splits[split]] for split in SPLITS}
    fits = [max(map(len, pair)) + 2 <= max_length for pair in words["train"]]
    if not any(fits):
        raise ValueError(f"max_length must leave a training pair, got {max_length}")
    text = splits | {"train": list(compress(splits["train"], fits))}
    words["train"] = list(compress(words["train"], fits))
    languages = [Language(name, count([pair[side] for pair in words["train"]]), tokenize)
                 for side, name in enumerate(names)]  # fmt: skip
    parts = {split: _pairs(text[split], words[split], languages, max_length) for split in SPLITS}
    dropped = {**(dropped or {}), "too long": fits.count(False)}
    return ParallelCorpus(*languages, **parts, dropped={why: n for why, n in dropped.items() if n})


def _pairs(text, words, languages, max_length):
    sides = [[pair[side] for pair in words] for side in range(2)]
    ids = ([language.encode(s, max_length) for s in side] for language, side in zip(languages, sides, strict=True))
    return Pairs(text, *sides, *ids)
