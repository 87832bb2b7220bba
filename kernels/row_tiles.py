"""What the kernels over (M, D) matrices share: the shape of a program's tile of rows, and its
dropout mask."""

import triton
import triton.language as tl
from fusedseq.kernels import philox

# Programs of a kernel that sums over rows: about four for each multiprocessor. The number does not
# depend on the GPU, so the order of the sums is the same on all of them.
PROGRAMS = 512


@triton.jit
def keep_mask(seed, row, column, D, threshold, N: tl.constexpr):
    """Returns the dropout mask of a tile, (R, N) bool, for rows `row` and columns column : column +
    N.

    row: (R,) int64    column: a multiple of 4    N: a multiple of 4
    """
    block = column // 4 + tl.arange(0, N // 4)
    return philox.keep(tl.load(seed), row[:, None] * tl.cdiv(D, 4) + block[None, :], threshold)


def contiguous(*tensors):
    return [t if t is None else t.contiguous() for t in tensors]


def tile_shape(D, elements, widest):
    """Returns (rows, columns) of a tile of about `elements` elements and at most `widest`
    columns."""
    N = min(max(triton.next_power_of_2(D), 4), widest)
    return max(1, elements // N), N
