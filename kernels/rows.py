"""What kernels over (M, D) rows share: the mask of a tile of rows, and how many rows a program takes."""

import triton
import triton.language as tl
from fusedseq.kernels import philox

PROGRAMS = 512  # that sum over rows: some four on each processor of a GPU, and the same sums on all of them


@triton.jit
def kept(seed, row, column, D, threshold, N: tl.constexpr):
    """Which elements of a tile are kept, (R, N) bool: rows `row`, (R,) int64, and columns from `column` on, whole fours."""
    block = column // 4 + tl.arange(0, N // 4)
    return philox.keep(tl.load(seed), row[:, None] * tl.cdiv(D, 4) + block[None, :], threshold)


def dense(*tensors):
    return [t if t is None else t.contiguous() for t in tensors]


def tile(D, elements, widest):
    """(rows, columns) of a program's tile of about that many elements."""
    N = min(max(triton.next_power_of_2(D), 4), widest)
    return max(1, elements // N), N
