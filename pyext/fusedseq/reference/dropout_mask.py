"""The random masks of every operator, by the counter-based generator Philox4x32-10 (Salmon et al.,
2011): a mask is a pure function of its seed, its shape and p."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

LOW = 0xFFFFFFFF

# The streams of random masks. All masks of an operator have one Philox key, the operator's seed;
# each has its own stream, a word of the Philox counter. So no two masks of an operator come from
# the same pair of key and counter, whatever their seeds are. csrc/math/mask_stream.h has the same
# table.
SINGLE = 0  # the mask of an operator that has one mask
INPUT = SINGLE  # of a recurrence's x, by the operator dropout or locked_dropout
STATE = 1  # of a recurrence's h
ZONEOUT_H = 2
ZONEOUT_C = 3
WEIGHT = 4  # weight drop of a recurrence's W_hh


def dropout_mask(
    seed: int | Tensor, p: float, shape: Sequence[int], device: torch.device | str | None = None
) -> Tensor:
    """The elements that a dropout of probability `p` keeps: a bool tensor, true where kept.

    seed: any 64-bit integer, or an int64 tensor of one element on any device
    p: in [0, 1]
    shape: the mask's shape
    device: the mask's device; by default that of the seed, or the CPU for an integer

    A mask is a matrix with rows of length S = shape[-1]. Element (row, j) is kept where word j % 4
    of a Philox block is at least round(p * 2**32); the block's key is `seed`, its counter is
    row * ceil(S / 4) + j // 4.
    """
    return stream_mask(SINGLE, seed, p, shape, device)


def stream_mask(
    stream: int,
    seed: int | Tensor,
    p: float,
    shape: Sequence[int],
    device: torch.device | str | None = None,
) -> Tensor:
    """`dropout_mask` for any stream: one of the masks of an operator that has several.

    stream: the third of the four words of the Philox counter, of which the first two are the
        counter of `dropout_mask` and the fourth is 0
    """
    if device is None:
        device = seed.device if isinstance(seed, Tensor) else "cpu"
    elif isinstance(seed, Tensor):
        seed = seed.to(device)
    *rows, S = shape or (1,)
    row = torch.arange(math.prod(rows), device=device)
    blocks = (S + 3) // 4
    counter = row[:, None] * blocks + torch.arange(blocks, device=device)
    words = torch.stack(philox(seed, counter, stream), dim=-1).flatten(1)[:, :S]
    return (words >= round(p * 2**32)).reshape(shape)


def philox(
    seed: int | Tensor, counter: Tensor, stream: int = SINGLE
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Returns the four 32-bit words of the Philox4x32-10 block with the 64-bit key `seed` and the
    counter (low half, high half, stream, 0), as int64 tensors of the counter's shape."""
    c0, c1 = counter & LOW, (counter >> 32) & LOW
    c2, c3 = torch.full_like(counter, stream), torch.zeros_like(counter)
    k0, k1 = seed & LOW, (seed >> 32) & LOW
    for _ in range(10):
        hi0, lo0 = multiply(0xD2511F53, c0)
        hi1, lo1 = multiply(0xCD9E8D57, c2)
        c0, c1, c2, c3 = hi1 ^ c1 ^ k0, lo1, hi0 ^ c3 ^ k1, lo0
        k0, k1 = (k0 + 0x9E3779B9) & LOW, (k1 + 0xBB67AE85) & LOW
    return c0, c1, c2, c3


def multiply(a: int, b: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the high and the low 32 bits of a * b, from products of 16-bit halves: a 64-bit
    product would overflow int64."""
    a_lo, a_hi, b_lo, b_hi = a & 0xFFFF, a >> 16, b & 0xFFFF, b >> 16
    ll, lh, hl, hh = a_lo * b_lo, a_lo * b_hi, a_hi * b_lo, a_hi * b_hi
    mid = (ll >> 16) + (lh & 0xFFFF) + (hl & 0xFFFF)
    return hh + (lh >> 16) + (hl >> 16) + (mid >> 16), ((mid & 0xFFFF) << 16) | (ll & 0xFFFF)


def drop(x: Tensor, keep: Tensor, p: float) -> Tensor:
    """Returns x / (1 - p) where `keep` is true, and 0 elsewhere; with p = 1 that is 0, not NaN."""
    return torch.where(keep, x * (1 / (1 - p) if p < 1 else 0.0), 0.0)
