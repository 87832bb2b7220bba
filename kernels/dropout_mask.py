"""The kernel and launcher of dropout_mask."""

import math

import torch
import triton
import triton.language as tl
from fusedseq.kernels import launch, philox

BLOCKS = 256  # Philox blocks of a program, two for each thread


@triton.jit(do_not_specialize=["blocks", "S", "threshold"])
def mask_kernel(
    seed,  # (1,) int64
    out,  # (rows, S) bool
    blocks,  # rows * ceil(S / 4): Philox blocks of the mask
    S,
    threshold,  # see philox.threshold
    N: tl.constexpr,  # Philox blocks of a program
):
    """Writes the dropout mask. A program owns the elements of N Philox blocks, four for each.

    It writes one byte per element, 0.25 ms for 2**30 elements on an H200 at 4.3 TB/s. The limit is
    Philox's integer arithmetic, 18 instructions per element, which takes longer. Not timed on a
    GPU.
    """
    block = tl.program_id(0).to(tl.int64) * N + tl.arange(0, N)
    keep = philox.keep(tl.load(seed), block, threshold)
    # A row has whole blocks: the words behind its last column belong to no element.
    blocks_of_row = tl.cdiv(S, 4)
    word = tl.arange(0, 4)[None, :]
    column = (block % blocks_of_row)[:, None] * 4 + word
    offset = (block // blocks_of_row)[:, None] * S + column
    inside = (block < blocks)[:, None] & (column < S)
    tl.store(out + offset, tl.reshape(keep, (N, 4)), mask=inside)


def dropout_mask(seed, p, shape):
    """Returns the mask of `shape`, true where an element is kept with probability 1 - p."""
    out = torch.empty(shape, dtype=torch.bool, device=seed.device)
    if philox.scale(p) == 0:
        return out.zero_()
    *rows, S = shape or (1,)
    blocks = math.prod(rows) * -(-S // 4)
    args = seed, out, blocks, S, philox.threshold(p)
    launch.run(mask_kernel, -(-blocks // BLOCKS), *args, warps=4, N=BLOCKS)
    return out


def explain(seed, p, shape, device=None):
    """Returns which kernel a call runs, and why."""
    return "kernels/dropout_mask.py; Philox4x32-10, four elements a counter"
