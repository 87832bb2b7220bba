"""The forward kernels: one keeps its rows in registers, one processes long rows by chunks."""

import triton
import triton.language as tl
from fusedseq.kernels.residual_layer_norm.tile import (
    UNSPECIALIZED,
    Dropout,
    load,
    residual_sum,
    tile_of_chunk,
    tile_of_rows,
)


@triton.jit
def as_returned(s, s_out):
    """Returns the sums of which y is the norm: those that the caller sees, which may be rounded."""
    if s_out is None:
        return s
    else:
        return s.to(s_out.dtype.element_ty).to(tl.float32)


@triton.jit
def normalized(s, mean, rstd, weight, bias, columns, D):
    """Returns a tile of LayerNorm's result."""
    y = (s - mean[:, None]) * rstd[:, None]
    if weight is not None:
        y *= load(weight, columns, columns < D)[None, :]
    if bias is not None:
        y += load(bias, columns, columns < D)[None, :]
    return y


@triton.jit(do_not_specialize=UNSPECIALIZED)
def forward_kernel(
    x,  # (M, D)
    residual,  # (M, D) or None
    weight,  # (D,) or None
    bias,  # (D,) or None
    y,  # (M, D)
    s_out,  # (M, D), the sum, for pre-norm; or None
    mean_out,  # (M,) fp32
    rstd_out,  # (M,) fp32
    seed,  # (1,) int64, read if DROPOUT
    M,
    D,
    threshold,  # see philox.threshold
    scale,  # factor of the elements that dropout keeps
    eps,
    DROPOUT: tl.constexpr,
    R: tl.constexpr,  # rows of a tile
    N: tl.constexpr,  # columns of a tile, at least D
):
    """Computes y, s, mean and rstd. A program owns R rows.

    Post-norm moves 3 M D elements, pre-norm 4 M D: 8.8 us for post-norm of (12288, 256) in fp32 on
    an H200 at 4.3 TB/s. Memory bandwidth is the limit: the arithmetic, about 10 M D FLOP, overlaps
    with it, and so does Philox, 18 integer instructions per element, 57 million here (about 2 us).
    Timed on an H200: docs/gpu-kernels.md.
    """
    dropout = Dropout(seed, threshold, scale)
    row = tl.program_id(0).to(tl.int64) * R + tl.arange(0, R)
    tile = tile_of_rows(row, M, D, N)
    s = as_returned(residual_sum(x, residual, tile, dropout, D, DROPOUT, N), s_out)
    if s_out is not None:
        tl.store(s_out + tile.offset, s.to(s_out.dtype.element_ty), mask=tile.inside)

    # Mean, then the variance of the centered row: the row is in registers.
    mean = tl.sum(s, 1) / D
    centered = tl.where(tile.inside, s - mean[:, None], 0.0)
    rstd = 1 / tl.sqrt(tl.sum(centered * centered, 1) / D + eps)
    out = normalized(s, mean, rstd, weight, bias, tile.columns, D)
    tl.store(y + tile.offset, out.to(y.dtype.element_ty), mask=tile.inside)
    tl.store(mean_out + row, mean, mask=row < M)
    tl.store(rstd_out + row, rstd, mask=row < M)


@triton.jit(do_not_specialize=UNSPECIALIZED)
def long_forward_kernel(
    x,  # this and the following as in forward_kernel
    residual,
    weight,
    bias,
    y,
    s_out,
    mean_out,
    rstd_out,
    seed,
    M,
    D,
    threshold,
    scale,
    eps,
    DROPOUT: tl.constexpr,
    R: tl.constexpr,  # 1
    N: tl.constexpr,  # columns of a chunk
):
    """Computes what forward_kernel does, for rows longer than N. A program owns a row and passes
    over it three times.

    The traffic to memory is that of forward_kernel; the second and third pass read the L2 cache.
    Philox is computed three times, 54 instructions per element. Not timed on a GPU.
    """
    dropout = Dropout(seed, threshold, scale)
    row = tl.program_id(0).to(tl.int64) + tl.arange(0, R)

    # Pass 1: the mean.
    total = tl.zeros((R,), tl.float32)
    for column in range(0, D, N):
        tile = tile_of_chunk(row, column, D, N)
        s = residual_sum(x, residual, tile, dropout, D, DROPOUT, N)
        total += tl.sum(as_returned(s, s_out), 1)
    mean = total / D

    # Pass 2: the variance, of centered elements as in forward_kernel.
    squares = tl.zeros((R,), tl.float32)
    for column in range(0, D, N):
        tile = tile_of_chunk(row, column, D, N)
        s = as_returned(residual_sum(x, residual, tile, dropout, D, DROPOUT, N), s_out)
        centered = tl.where(tile.inside, s - mean[:, None], 0.0)
        squares += tl.sum(centered * centered, 1)
    rstd = 1 / tl.sqrt(squares / D + eps)

    # Pass 3: the results.
    for column in range(0, D, N):
        tile = tile_of_chunk(row, column, D, N)
        s = as_returned(residual_sum(x, residual, tile, dropout, D, DROPOUT, N), s_out)
        if s_out is not None:
            tl.store(s_out + tile.offset, s.to(s_out.dtype.element_ty), mask=tile.inside)
        out = normalized(s, mean, rstd, weight, bias, tile.columns, D)
        tl.store(y + tile.offset, out.to(y.dtype.element_ty), mask=tile.inside)
    tl.store(mean_out + row, mean)
    tl.store(rstd_out + row, rstd)
