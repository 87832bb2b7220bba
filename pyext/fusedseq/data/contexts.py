"""A word and the words around it: CBOW's windows over lines, cut from the stream when a batch asks for them."""

import random
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from fusedseq.data import PAD
from fusedseq.data.row_batches import RowBatches


@dataclass(frozen=True)
class Contexts:
    """n windows. A window does not reach into another line: PAD stands for what is beyond the line's ends.

    stream: (m,) int32, lines with at least `radius` PAD before, between and after them
    positions: (n,) int64, of the middle words in the stream    targets: (n,) int64, the middle words, or labels for them
    """

    stream: Tensor
    positions: Tensor
    targets: Tensor
    radius: int

    @classmethod
    def of(cls, lines, radius=3):
        """lines: lists of ids; every word of a line of at least two is a target."""
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

    def __len__(self):
        return len(self.positions)

    def windows(self, numbers):
        """The context words of some windows, those to the left first: (B, 2 * radius) int64. numbers: (B,)"""
        offsets = torch.tensor([d for d in range(-self.radius, self.radius + 1) if d], dtype=torch.int64)
        return self.stream[self.positions[numbers].unsqueeze(1) + offsets].long()

    def labelled(self, targets):
        """The same windows with other targets, (n,): a model's own labels, for domain adaptation. One below 0 stands for
        none: that window is left out."""
        if targets.shape != self.targets.shape:
            raise ValueError(f"Contexts: targets must be {tuple(self.targets.shape)}, got {tuple(targets.shape)}")
        there = targets >= 0
        return replace(self, positions=self.positions[there], targets=targets[there].long())

    def __add__(self, other):
        """The windows of both, this one's first."""
        if self.radius != other.radius:
            raise ValueError(f"Contexts: radius must be {self.radius} in both, got {other.radius}")
        positions = torch.cat([self.positions, other.positions + len(self.stream)])
        return Contexts(torch.cat([self.stream, other.stream]), positions,
                        torch.cat([self.targets, other.targets]), self.radius)  # fmt: skip


class ContextBatch(NamedTuple):
    context: Tensor  # (B, 2 * radius) int64
    target: Tensor  # (B,) int64
    numbers: Tensor  # (B,) of the windows
    items: int  # B


class ContextBatches(RowBatches):
    """One pass over the windows; a pure function of (contexts, batch, key). key: of the order; None: that of the text."""

    def __init__(self, contexts, batch, key=None):
        if batch < 1:
            raise ValueError(f"ContextBatches: batch must be at least 1, got {batch}")
        self.contexts, self.batch, order = contexts, batch, torch.arange(len(contexts))
        if key is not None:
            generator = torch.Generator().manual_seed(random.Random(key).getrandbits(63))
            order = torch.randperm(len(contexts), generator=generator)
        self.order = order

    def __len__(self):
        return -(-len(self.order) // self.batch)

    def rows(self, i):
        return self.order[i * self.batch : (i + 1) * self.batch]

    def batch_of(self, numbers):
        return ContextBatch(self.contexts.windows(numbers), self.contexts.targets[numbers], numbers, len(numbers))
