"""A kernel around kernels/philox.py, in a file of its own because it imports triton."""

import torch
import triton
import triton.language as tl
from fusedseq.kernels import launch, philox


@triton.jit(do_not_specialize=["threshold"])
def tile_kernel(seed, counter, out, threshold, shape: tl.constexpr, n: tl.constexpr):
    tile = tl.reshape(tl.load(counter + tl.arange(0, n)), shape)
    kept = philox.keep(tl.load(seed), tile, threshold)
    tl.store(out + tl.arange(0, 4 * n), tl.reshape(kept, (4 * n,)))


def kept(seed, counter, p):
    """What is kept of the blocks at `counter`, of one to three dimensions: (..., C) int64 gives (..., 4 C) bool."""
    out = torch.empty(*counter.shape[:-1], 4 * counter.shape[-1], dtype=torch.bool, device=counter.device)
    seed = torch.tensor([seed], device=counter.device)
    launch.run(tile_kernel, 1, seed, counter, out, philox.threshold(p), warps=4, shape=tuple(counter.shape),
               n=counter.numel())  # fmt: skip
    return out
