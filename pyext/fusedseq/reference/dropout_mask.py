"""The random masks of every operator: Philox4x32-10 (Salmon et al., 2011), a pure function of (seed, index, p)."""

import torch

LOW = 0xFFFFFFFF


def dropout_mask(seed, p, shape, device=None):
    """Which elements a dropout of probability `p` keeps: a bool tensor, True = kept.

    seed: int, or an int64 tensor of one element (on any device)    p: in [0, 1]    shape: the mask's shape
    device: where the mask is made; by default the seed's device

    A mask is a matrix of rows of length S = shape[-1]. Element (row, j) is word j % 4 of the Philox block with
    key `seed` and counter row * ceil(S / 4) + j // 4, and it is kept where word >= round(p * 2**32).
    """
    if device is None:
        device = seed.device if isinstance(seed, torch.Tensor) else "cpu"
    elif isinstance(seed, torch.Tensor):
        seed = seed.to(device)
    *rows, S = shape or (1,)
    row = torch.arange(torch.Size(rows).numel(), device=device)
    blocks = (S + 3) // 4
    counter = row[:, None] * blocks + torch.arange(blocks, device=device)
    words = torch.stack(philox(seed, counter), dim=-1).flatten(1)[:, :S]
    return (words >= round(p * 2**32)).reshape(shape)


def philox(seed, counter):
    """Philox4x32-10 with a 64-bit key and counter (lo, hi, 0, 0): four int64 tensors of 32-bit words."""
    c0, c1 = counter & LOW, (counter >> 32) & LOW
    c2, c3 = torch.zeros_like(counter), torch.zeros_like(counter)
    k0, k1 = seed & LOW, (seed >> 32) & LOW
    for _ in range(10):
        hi0, lo0 = multiply(0xD2511F53, c0)
        hi1, lo1 = multiply(0xCD9E8D57, c2)
        c0, c1, c2, c3 = hi1 ^ c1 ^ k0, lo1, hi0 ^ c3 ^ k1, lo0
        k0, k1 = (k0 + 0x9E3779B9) & LOW, (k1 + 0xBB67AE85) & LOW
    return c0, c1, c2, c3


def multiply(a, b):
    """The high and low 32 bits of a * b, by 16-bit halves: a 64-bit product would overflow int64."""
    a_lo, a_hi, b_lo, b_hi = a & 0xFFFF, a >> 16, b & 0xFFFF, b >> 16
    ll, lh, hl, hh = a_lo * b_lo, a_lo * b_hi, a_hi * b_lo, a_hi * b_hi
    mid = (ll >> 16) + (lh & 0xFFFF) + (hl & 0xFFFF)
    return hh + (lh >> 16) + (hl >> 16) + (mid >> 16), ((mid & 0xFFFF) << 16) | (ll & 0xFFFF)


def drop(x, keep, p):
    """x / (1 - p) where kept, 0 elsewhere (everywhere, without NaN, at p = 1)."""
    return torch.where(keep, x * (1 / (1 - p) if p < 1 else 0.0), 0.0)
