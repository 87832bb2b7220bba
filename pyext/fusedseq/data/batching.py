"""A stream of ids as parallel columns, read in segments of varying length (Merity et al., 2018)."""

import random
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

IGNORED = -100  # cross_entropy's ignore_index


def batchify(stream: Tensor, batch: int) -> tuple[Tensor, Tensor]:
    """Arranges a stream in columns of inputs and targets, the next words.

    stream: (n,) int64    batch: the number of columns
    returns inputs, targets: (ceil((n-1)/batch), batch) each
    Errors: ValueError for a batch below 1 or a stream of fewer than 2 words.

    Every word but the first is a target exactly once: the last target of a column is the first word
    of the next column, and the last column is padded with IGNORED targets. (The AWD-LSTM code drops
    up to batch - 1 words at the end, and does not predict the first word of a column.)
    """
    if batch < 1:
        raise ValueError(f"batchify: batch must be at least 1, got {batch}")
    if len(stream) < 2:
        raise ValueError(f"batchify: the stream must have at least 2 words, got {len(stream)}")
    rows = -(-(len(stream) - 1) // batch)
    filler = rows * batch - (len(stream) - 1)
    inputs = torch.cat([stream[:-1], stream.new_zeros(filler)])
    targets = torch.cat([stream[1:], stream.new_full((filler,), IGNORED)])
    return inputs.view(batch, rows).t().contiguous(), targets.view(batch, rows).t().contiguous()


def segments(rows: int, bptt: int, rng: random.Random | None = None) -> list[tuple[int, int]]:
    """Divides `rows` steps for truncated backpropagation into consecutive (start, length).

    rng: draws AWD-LSTM's lengths: around `bptt` with probability .95, otherwise around half of it,
        with a normal distribution of standard deviation 5 and a minimum of 5. None: every segment
        has length `bptt`. The last segment is the rest
    Errors: ValueError for a bptt below 1.
    """
    if bptt < 1:
        raise ValueError(f"segments: bptt must be at least 1, got {bptt}")
    spans, start = [], 0
    while start < rows:
        length = bptt
        if rng is not None:
            length = max(5, int(rng.normalvariate(bptt if rng.random() < 0.95 else bptt / 2, 5)))
        length = min(length, rows - start)
        spans.append((start, length))
        start += length
    return spans


class Batch(NamedTuple):
    """One segment of all columns."""

    inputs: Tensor  # (T, B)
    targets: Tensor  # (T, B)
    items: int  # the number of targets that are not IGNORED
    lr_scale: float  # the factor of the learning rate


class Batches(Sequence[Batch]):
    """The segments of one pass over the columns, determined by (inputs, targets, bptt, key).

    inputs, targets: as `batchify` returns them    bptt: as in `segments`
    key: any string, e.g. seed and epoch, from which varying lengths are drawn; None: every segment
        has length `bptt`

    With varying lengths the learning rate of a batch is scaled by its length over `bptt`, because
    its gradient is a mean over that length.
    """

    def __init__(self, inputs: Tensor, targets: Tensor, bptt: int, key: str | None = None) -> None:
        self.inputs, self.targets, self.bptt, self.varying = inputs, targets, bptt, key is not None
        self.spans = segments(len(inputs), bptt, None if key is None else random.Random(key))
        # Counted for each row once, so that no step waits for the device.
        self.counts: list[int] = (targets != IGNORED).sum(1).tolist()

    def __len__(self) -> int:
        return len(self.spans)

    def __getitem__(self, i: int) -> Batch:  # type: ignore[override]  # slices are not supported
        start, length = self.spans[i]
        rows = slice(start, start + length)
        scale = length / self.bptt if self.varying else 1.0
        return Batch(self.inputs[rows], self.targets[rows], sum(self.counts[rows]), scale)
