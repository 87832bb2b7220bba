"""Sequences of numbers and their reversals, generated as the document's CustomDataSet does."""

import random
import zlib
from dataclasses import dataclass
from typing import NamedTuple

import torch

from fusedseq.data import PAD, SPLITS
from fusedseq.data.row_batches import RowBatches
from fusedseq.data.statistics import Side
from fusedseq.data.vocabulary import Vocabulary

SIZES = {1: 4, 2: 20, 3: 100, 4: 400, 5: 5000}  # sequences drawn of each length, before duplicates are dropped
LEFT = 4992  # that the document has left


class Reversal(NamedTuple):
    source: torch.Tensor  # (n, L) int64, PAD after the end
    target: torch.Tensor  # (n, L) the same numbers backwards, PAD after the end
    lengths: torch.Tensor  # (n,) int64


class ReversalBatch(NamedTuple):
    source: torch.Tensor  # (B, L)
    target: torch.Tensor  # (B, L)
    lengths: torch.Tensor  # (B,)
    items: int  # numbers in `target`, padding counted, as the document trains and counts it


@dataclass(frozen=True)
class Reversals:
    vocabulary: Vocabulary  # <pad>, 1, 2, ...
    train: Reversal
    valid: Reversal
    test: Reversal

    def sides(self):
        words = {split: [self.vocabulary.decode(row[:n]) for row, n in zip(part.source.tolist(), part.lengths.tolist(),
                                                                          strict=True)]
                 for split in SPLITS for part in [getattr(self, split)]}  # fmt: skip
        return [Side("numbers", self.vocabulary, words)]

    def fingerprint(self):
        crc = 0
        for split in SPLITS:
            crc = zlib.crc32(getattr(self, split).source.numpy().tobytes(), crc)
        return crc


class ReversalBatches(RowBatches):
    """One pass over a split; a pure function of (part, batch, key). key: of the order; None: that of the split."""

    def __init__(self, part, batch, key=None):
        if batch < 1:
            raise ValueError(f"ReversalBatches: batch must be at least 1, got {batch}")
        self.part, self.batch, self.order = part, batch, list(range(len(part.source)))
        if key is not None:
            random.Random(key).shuffle(self.order)

    def __len__(self):
        return -(-len(self.order) // self.batch)

    def rows(self, i):
        return self.order[i * self.batch : (i + 1) * self.batch]

    def batch_of(self, rows):
        source, target, lengths = (tensor[rows] for tensor in self.part)
        return ReversalBatch(source, target, lengths, target.numel())


def load(data=None, *, seed=0, sizes=SIZES, max_length=5, numbers=9, limit=LEFT, shares=(0.2, 0.1)):
    """Distinct sequences of 1 .. `numbers`, split into train, valid and the rest for test.

    data: nothing but 'synthetic', for nothing is read    seed: of the numbers and the split
    sizes: how many are drawn of each length; duplicates are dropped then    limit: how many are kept at most, drawn at
        random: the document's sizes are not known but for the 4,992 they leave. None: all
    shares: of all, for train and valid; train is rounded down, and so is valid (998, 499 and 3,495 of 4,992)
    """
    if data not in (None, "synthetic"):
        raise ValueError(f"reverse: the data are generated: leave --data out or give 'synthetic', got {data}")
    if max(sizes) > max_length or min(sizes) < 1:
        raise ValueError(f"reverse: the lengths in sizes must be in 1 .. {max_length}, got {sorted(sizes)}")
    rng = random.Random(f"reverse/{seed}")
    drawn = [tuple(rng.randint(1, numbers) for _ in range(n)) for n, size in sizes.items() for _ in range(size)]
    rows = list(dict.fromkeys(drawn))
    rng.shuffle(rows)
    rows = rows[:limit]
    train, valid = (int(len(rows) * share) for share in shares)
    if min(train, valid, len(rows) - train - valid) < 1:
        raise ValueError(f"reverse: every split must have a sequence, got {len(rows)} sequences for shares {shares}")
    parts = rows[:train], rows[train : train + valid], rows[train + valid :]
    vocabulary = Vocabulary(["<pad>", *map(str, range(1, numbers + 1))])
    return Reversals(vocabulary, *(_padded(part, max_length) for part in parts))


def _padded(rows, length):
    source = [[*row, *[PAD] * (length - len(row))] for row in rows]
    target = [[*row[::-1], *[PAD] * (length - len(row))] for row in rows]
    return Reversal(torch.tensor(source), torch.tensor(target), torch.tensor([len(row) for row in rows]))
