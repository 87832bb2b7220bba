"""Sequences of numbers and their reversals, generated as the source report's CustomDataSet does."""

import random
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from fusedseq.data import PAD, SPLITS
from fusedseq.data.row_batches import RowBatches
from fusedseq.data.statistics import Side
from fusedseq.data.vocabulary import Vocabulary

# Sequences drawn of each length, before duplicates are removed.
SIZES = {1: 4, 2: 20, 3: 100, 4: 400, 5: 5000}
LIMIT = 4992  # the number of sequences in the source report


class Reversal(NamedTuple):
    """The sequences of a split."""

    source: Tensor  # (n, L) int64, padded with PAD
    target: Tensor  # (n, L), the same numbers in reverse order, padded with PAD
    lengths: Tensor  # (n,) int64


class ReversalBatch(NamedTuple):
    """A batch of sequences."""

    source: Tensor  # (B, L)
    target: Tensor  # (B, L)
    lengths: Tensor  # (B,)
    items: int  # ids in `target` of which the objective is a mean


@dataclass(frozen=True)
class Reversals:
    """The sequences of all splits."""

    vocabulary: Vocabulary  # <pad>, 1, 2, ...
    train: Reversal
    valid: Reversal
    test: Reversal

    def sides(self) -> list[Side]:
        """Returns the source sequences as words, for the statistics."""
        words = {
            split: [
                self.vocabulary.decode(row[:n])
                for row, n in zip(part.source.tolist(), part.lengths.tolist(), strict=True)
            ]
            for split in SPLITS
            for part in [getattr(self, split)]
        }
        return [Side("numbers", self.vocabulary, words)]

    def fingerprint(self) -> int:
        """Returns a checksum of the sequences: a run cannot be resumed on other data."""
        crc = 0
        for split in SPLITS:
            crc = zlib.crc32(getattr(self, split).source.numpy().tobytes(), crc)
        return crc


class ReversalBatches(RowBatches):
    """The batches of one pass over a split, determined by (part, batch, key).

    key: any string, from which a random order is drawn; None: the order of the split
    count_padding: whether padding is among the items of a batch, as the source report trains it
    Errors: ValueError for a batch below 1.
    """

    def __init__(
        self, part: Reversal, batch: int, key: str | None = None, *, count_padding: bool = True
    ) -> None:
        if batch < 1:
            raise ValueError(f"ReversalBatches: batch must be at least 1, got {batch}")
        self.part, self.batch, self.order = part, batch, list(range(len(part.source)))
        self.count_padding = count_padding
        if key is not None:
            random.Random(key).shuffle(self.order)

    def __len__(self) -> int:
        return -(-len(self.order) // self.batch)

    def rows(self, i: int) -> list[int]:
        return self.order[i * self.batch : (i + 1) * self.batch]

    def batch_of(self, rows: list[int]) -> ReversalBatch:
        source, target, lengths = (tensor[rows] for tensor in self.part)
        items = target.numel() if self.count_padding else int(lengths.sum())
        return ReversalBatch(source, target, lengths, items)


def load(
    data: str | None = None,
    *,
    seed: int = 0,
    sizes: Mapping[int, int] = SIZES,
    max_length: int = 5,
    numbers: int = 9,
    limit: int | None = LIMIT,
    shares: tuple[float, float] = (0.2, 0.1),
) -> Reversals:
    """Generates distinct sequences of 1 .. `numbers` and splits them into train, valid and test.

    data: None or 'synthetic', because no file is read    seed: of the numbers and the split
    sizes: how many sequences are drawn of each length, before duplicates are removed
    max_length: the length to which all are padded
    limit: the largest number of sequences, of which a random subset is taken; None for all. The
        source report's sizes are unknown except for the 4,992 sequences that remain
    shares: the fractions for train and valid, rounded down (998, 499 and 3,495 of 4,992)
    Errors: ValueError for other data, lengths outside 1 .. `max_length`, and an empty split.
    """
    if data not in (None, "synthetic"):
        raise ValueError(
            f"reverse: the data are generated: leave --data out or give 'synthetic', got {data}"
        )
    if max(sizes) > max_length or min(sizes) < 1:
        raise ValueError(
            f"reverse: the lengths in sizes must be in 1 .. {max_length}, got {sorted(sizes)}"
        )
    rng = random.Random(f"reverse/{seed}")
    drawn = [
        tuple(rng.randint(1, numbers) for _ in range(n))
        for n, size in sizes.items()
        for _ in range(size)
    ]
    rows = list(dict.fromkeys(drawn))
    rng.shuffle(rows)
    rows = rows[:limit]
    train, valid = (int(len(rows) * share) for share in shares)
    if min(train, valid, len(rows) - train - valid) < 1:
        raise ValueError(
            f"reverse: every split must have a sequence, got {len(rows)} sequences for shares "
            f"{shares}"
        )
    parts = rows[:train], rows[train : train + valid], rows[train + valid :]
    vocabulary = Vocabulary(["<pad>", *map(str, range(1, numbers + 1))])
    return Reversals(vocabulary, *(_padded(part, max_length) for part in parts))


def _padded(rows: Sequence[tuple[int, ...]], length: int) -> Reversal:
    source = [[*row, *[PAD] * (length - len(row))] for row in rows]
    target = [[*row[::-1], *[PAD] * (length - len(row))] for row in rows]
    lengths = [len(row) for row in rows]
    return Reversal(torch.tensor(source), torch.tensor(target), torch.tensor(lengths))
