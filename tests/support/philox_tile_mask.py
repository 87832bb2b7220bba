"""A kernel that evaluates kernels/philox.py on a tile; in a file of its own because it imports
triton."""

import torch
import triton
import triton.language as tl
from fusedseq.kernels import launch, philox


@triton.jit(do_not_specialize=["threshold"])
def tile_kernel(
    seed,  # (1,) int64
    counter,  # (n,) int64
    out,  # (4 n,) bool
    threshold,  # see philox.threshold
    shape: tl.constexpr,  # of the tile of counters
    n: tl.constexpr,  # elements of the tile
):
    """Writes which elements of a tile are kept. One program owns the tile."""
    tile = tl.reshape(tl.load(counter + tl.arange(0, n)), shape)
    keep = philox.keep(tl.load(seed), tile, threshold)
    tl.store(out + tl.arange(0, 4 * n), tl.reshape(keep, (4 * n,)))


def keep_mask(seed, counter, p):
    """Returns which elements of the Philox blocks at `counter` are kept: (..., 4 C) bool.

    counter: (..., C) int64, of one to three dimensions
    """
    out = torch.empty(
        *counter.shape[:-1], 4 * counter.shape[-1], dtype=torch.bool, device=counter.device
    )
    seed = torch.tensor([seed], device=counter.device)
    args = seed, counter, out, philox.threshold(p)
    launch.run(tile_kernel, 1, *args, warps=4, shape=tuple(counter.shape), n=counter.numel())
    return out
