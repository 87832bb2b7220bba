"""Words and their contexts: CBOW's windows over lines, cut from the stream for each batch."""

import random
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import NamedTuple, Self

import torch
from torch import Tensor

from fusedseq.data import PAD
from fusedseq.data.row_batches import RowBatches


@dataclass(frozen=True)
class Contexts:
    """n windows. A window does not extend into another line: PAD fills it beyond the line's ends.

    stream: (m,) int32, lines with at least `radius` PAD before, between and after them
    positions: (n,) int64, of the middle words in the stream
    targets: (n,) int64, the middle words, or labels for them
    radius: context words on each side
    """

    stream: Tensor
    positions: Tensor
    targets: Tensor
    radius: int

    @classmethod
    def of(cls, lines: Iterable[list[int]], radius: int = 3) -> Self:
        """Builds the windows of lines of ids; every word of a line of at least two is a target.

        Errors: ValueError for a radius below 1.
        """
        if radius < 1:
            raise ValueError(f"Contexts: radius must be at least 1, got {radius}")
        gap, ids = [PAD] * radius, [PAD] * radius
        for line in lines:
            if len(line) > 1:
                ids += line
                ids += gap
        stream = torch.tensor(ids, dtype=torch.int32)
        positions = (stream != PAD).nonzero().flatten()
        return cls(stream, positions, stream[positions].long(), radius)

    def __len__(self) -> int:
        return len(self.positions)

    def windows(self, numbers: Tensor) -> Tensor:
        """Returns the context words of windows, left to right: (B, 2 * radius) int64.

        numbers: (B,) int64
        """
        offsets = torch.tensor(
            [d for d in range(-self.radius, self.radius + 1) if d], dtype=torch.int64
        )
        return self.stream[self.positions[numbers].unsqueeze(1) + offsets].long()

    def labelled(self, targets: Tensor) -> "Contexts":
        """Returns the same windows with other targets, e.g. a model's own labels.

        targets: (n,); a window whose target is negative is left out
        Errors: ValueError for another shape.
        """
        if targets.shape != self.targets.shape:
            raise ValueError(
                f"Contexts: targets must be {tuple(self.targets.shape)}, got {tuple(targets.shape)}"
            )
        present = targets >= 0
        return replace(self, positions=self.positions[present], targets=targets[present].long())

    def __add__(self, other: "Contexts") -> "Contexts":
        """Returns the windows of both, this one's first; ValueError if the radii differ."""
        if self.radius != other.radius:
            raise ValueError(f"Contexts: radius must be {self.radius} in both, got {other.radius}")
        positions = torch.cat([self.positions, other.positions + len(self.stream)])
        return Contexts(
            torch.cat([self.stream, other.stream]),
            positions,
            torch.cat([self.targets, other.targets]),
            self.radius,
        )


class ContextBatch(NamedTuple):
    """A batch of windows."""

    context: Tensor  # (B, 2 * radius) int64
    target: Tensor  # (B,) int64
    numbers: Tensor  # (B,) of the windows
    items: int  # B


class ContextBatches(RowBatches):
    """The batches of one pass over the windows, determined by (contexts, batch, key).

    batch: windows in a batch
    key: any string, from which a random order is drawn; None: the order of the text
    Errors: ValueError for a batch below 1.
    """

    def __init__(self, contexts: Contexts, batch: int, key: str | None = None) -> None:
        if batch < 1:
            raise ValueError(f"ContextBatches: batch must be at least 1, got {batch}")
        self.contexts, self.batch, order = contexts, batch, torch.arange(len(contexts))
        if key is not None:
            generator = torch.Generator().manual_seed(random.Random(key).getrandbits(63))
            order = torch.randperm(len(contexts), generator=generator)
        self.order = order

    def __len__(self) -> int:
        return -(-len(self.order) // self.batch)

    def rows(self, i: int) -> Tensor:
        return self.order[i * self.batch : (i + 1) * self.batch]

    def batch_of(self, rows: Tensor) -> ContextBatch:
        return ContextBatch(
            self.contexts.windows(rows), self.contexts.targets[rows], rows, len(rows)
        )
