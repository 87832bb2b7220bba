"""The backward kernels: one keeps its rows in registers, one processes long rows by chunks."""

import triton
import triton.language as tl
from fusedseq.kernels.residual_layer_norm.tile import (
    UNSPECIALIZED,
    Dropout,
    apply_dropout,
    load,
    residual_sum,
    tile_of_chunk,
    tile_of_rows,
)


@triton.jit
def store_gradients(
    d,  # (R, N) fp32, the gradient of s through the norm
    ds,  # (M, D), the gradient of the returned s, for pre-norm; or None
    dx,  # (M, D) or None
    dresidual,  # (M, D) or None
    tile,  # Tile
    dropout,  # Dropout
    D,
    DROPOUT: tl.constexpr,
    N: tl.constexpr,
):
    """Stores a tile of dx and dresidual."""
    if ds is not None:
        d += load(ds, tile.offset, tile.inside)
    if dresidual is not None:
        tl.store(dresidual + tile.offset, d.to(dresidual.dtype.element_ty), mask=tile.inside)
    if dx is not None:
        if DROPOUT:
            d = apply_dropout(d, tile, dropout, D, N)
        tl.store(dx + tile.offset, d.to(dx.dtype.element_ty), mask=tile.inside)


@triton.jit(do_not_specialize=UNSPECIALIZED)
def backward_kernel(
    dy,  # (M, D)
    ds,  # (M, D), the gradient of the returned s, for pre-norm; or None
    x,  # (M, D); s itself if SUMMED
    residual,  # (M, D) or None
    weight,  # (D,) or None
    mean_in,  # (M,) fp32
    rstd_in,  # (M,) fp32
    dx,  # (M, D), None where not needed, as the next three
    dresidual,  # (M, D)
    dweight,  # (programs, D) fp32, partial sums
    dbias,  # (programs, D) fp32, partial sums
    seed,  # (1,) int64, read if DROPOUT
    M,
    D,
    threshold,  # see philox.threshold
    scale,  # factor of the elements that dropout keeps
    DROPOUT: tl.constexpr,
    SUMMED: tl.constexpr,  # whether s was saved, as for pre-norm
    R: tl.constexpr,  # rows of a tile
    N: tl.constexpr,  # columns of a tile, at least D
):
    """Computes all gradients. A program owns every n-th tile of R rows, n the number of programs.

    It moves 5 M D elements, post-norm or pre-norm: 14.6 us for (12288, 256) in fp32 on an H200 at
    4.3 TB/s, and 1 MB of partial sums, written and read: 0.5 us. About 20 M D FLOP, and the mask
    twice in post-norm, once in pre-norm. Memory bandwidth is the limit. Tried: twice the elements
    per tile, which spills on sm_80. Timed on an H200: docs/gpu-kernels.md.
    """
    dropout = Dropout(seed, threshold, scale)
    columns = tl.arange(0, N)
    w_sum = tl.zeros((R, N), tl.float32)
    b_sum = tl.zeros((R, N), tl.float32)
    for step in range(tl.program_id(0), tl.cdiv(M, R), tl.num_programs(0)):
        row = (step * R + tl.arange(0, R)).to(tl.int64)
        tile = tile_of_rows(row, M, D, N)
        mean = tl.load(mean_in + row, mask=row < M, other=0.0)
        rstd = tl.load(rstd_in + row, mask=row < M, other=0.0)

        # The normalized row n is recomputed.
        d = load(dy, tile.offset, tile.inside)
        s = residual_sum(x, residual, tile, dropout, D, DROPOUT and not SUMMED, N)
        n = tl.where(tile.inside, (s - mean[:, None]) * rstd[:, None], 0.0)
        if dweight is not None:
            w_sum += d * n
        if dbias is not None:
            b_sum += d

        # The gradient of s, from which those of x and residual follow.
        if weight is not None:
            d *= load(weight, columns, columns < D)[None, :]
        if dx is not None or dresidual is not None:
            d_s = d - (tl.sum(d, 1) / D)[:, None]
            d_s = d_s - n * (tl.sum(d * n, 1) / D)[:, None]
            d_s = d_s * rstd[:, None]
            store_gradients(d_s, ds, dx, dresidual, tile, dropout, D, DROPOUT, N)

    offset = tl.program_id(0).to(tl.int64) * D + columns
    if dweight is not None:
        tl.store(dweight + offset, tl.sum(w_sum, 0), mask=columns < D)
    if dbias is not None:
        tl.store(dbias + offset, tl.sum(b_sum, 0), mask=columns < D)


@triton.jit
def add_in_memory(p, offset, value, inside):
    """Adds value to elements that no other program accesses."""
    tl.store(p + offset, tl.load(p + offset, mask=inside, other=0.0) + value, mask=inside)


@triton.jit(do_not_specialize=UNSPECIALIZED)
def long_backward_kernel(
    dy,  # this and the following as in backward_kernel
    ds,
    x,
    residual,
    weight,
    mean_in,
    rstd_in,
    dx,
    dresidual,
    dweight,  # (programs, D) fp32, zeroed by the caller
    dbias,  # (programs, D) fp32, zeroed by the caller
    seed,
    M,
    D,
    threshold,
    scale,
    DROPOUT: tl.constexpr,
    SUMMED: tl.constexpr,
    R: tl.constexpr,  # 1
    N: tl.constexpr,  # columns of a chunk
):
    """Computes what backward_kernel does, for rows longer than N. A program owns every n-th row and
    passes over it twice.

    The traffic to memory is that of backward_kernel; the second pass reads the L2 cache, in which
    dweight and dbias, too long for registers, accumulate as well. Not timed on a GPU.
    """
    dropout = Dropout(seed, threshold, scale)
    for m in range(tl.program_id(0), M, tl.num_programs(0)):
        row = (m + tl.arange(0, R)).to(tl.int64)
        mean, rstd = tl.load(mean_in + row), tl.load(rstd_in + row)

        # Pass 1: the row's two sums, and the gradients of weight and bias.
        d_sum = tl.zeros((R,), tl.float32)
        dn_sum = tl.zeros((R,), tl.float32)
        for column in range(0, D, N):
            tile = tile_of_chunk(row, column, D, N)
            s = residual_sum(x, residual, tile, dropout, D, DROPOUT and not SUMMED, N)
            n = tl.where(tile.inside, (s - mean[:, None]) * rstd[:, None], 0.0)
            d = load(dy, tile.offset, tile.inside)
            columns = tile.columns
            partial = tl.program_id(0).to(tl.int64) * D + columns
            if dweight is not None:
                add_in_memory(dweight, partial, tl.sum(d * n, 0), columns < D)
            if dbias is not None:
                add_in_memory(dbias, partial, tl.sum(d, 0), columns < D)
            if weight is not None:
                d *= load(weight, columns, columns < D)[None, :]
            d_sum += tl.sum(d, 1)
            dn_sum += tl.sum(d * n, 1)

        # In the next row another thread may add to the same sums.
        tl.debug_barrier()

        # Pass 2: the gradients of x and residual.
        if dx is not None or dresidual is not None:
            for column in range(0, D, N):
                tile = tile_of_chunk(row, column, D, N)
                s = residual_sum(x, residual, tile, dropout, D, DROPOUT and not SUMMED, N)
                n = (s - mean[:, None]) * rstd[:, None]
                d = load(dy, tile.offset, tile.inside)
                if weight is not None:
                    d *= load(weight, tile.columns, tile.columns < D)[None, :]
                d_s = d - (d_sum / D)[:, None]
                d_s = d_s - n * (dn_sum / D)[:, None]
                d_s = d_s * rstd[:, None]
                store_gradients(d_s, ds, dx, dresidual, tile, dropout, D, DROPOUT, N)
