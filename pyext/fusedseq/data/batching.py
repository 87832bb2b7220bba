"""A stream of ids as parallel columns, read in segments of varying length (Merity et al., 2018)."""

import random
from collections.abc import Sequence
from typing import NamedTuple

import torch

IGNORED = -100  # cross_entropy's ignore_index


def batchify(stream, batch):
    """Pairs of a word and its successor, in `batch` columns that are read side by side.

    stream: (n,) int64    returns inputs, targets: (ceil((n-1)/batch), batch)

    Every word but the first is a target exactly once: a column ends with the first word of the next as its target,
    and the end of the last column is filled with IGNORED targets. (The AWD-LSTM code drops the up to batch - 1 words
    that remain, and does not predict the first word of a column.)
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


def segments(rows, bptt, rng=None):
    """How `rows` steps are cut for truncated backpropagation: a list of (start, length), without a gap.

    rng: a random.Random for AWD-LSTM's lengths: `bptt` with probability .95, else half of it; then at least 5 and
        normal around that with deviation 5. None: every segment is `bptt` long. The last one is what remains.
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
    inputs: torch.Tensor  # (T, B)
    targets: torch.Tensor  # (T, B)
    items: int  # targets that count
    lr_scale: float


class Batches(Sequence):
    """The segments of one pass over the columns; a pure function of (inputs, targets, bptt, key).

    key: any string, e.g. seed and epoch, from which varying lengths are drawn; None: all `bptt`. A batch's learning
    rate is scaled by its length over `bptt`, for its gradient is a mean over that length.
    """

    def __init__(self, inputs, targets, bptt, key=None):
        self.inputs, self.targets, self.bptt, self.varying = inputs, targets, bptt, key is not None
        self.spans = segments(len(inputs), bptt, None if key is None else random.Random(key))
        self.counts = (targets != IGNORED).sum(1).tolist()  # of each row, once: no device is waited for in a step

    def __len__(self):
        return len(self.spans)

    def __getitem__(self, i):
        start, length = self.spans[i]
        rows = slice(start, start + length)
        scale = length / self.bptt if self.varying else 1.0
        return Batch(self.inputs[rows], self.targets[rows], sum(self.counts[rows]), scale)
