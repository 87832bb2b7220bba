"""residual + dropout(x), LayerNorm over it, and the gradients of both.

A program processes some rows, which stay in registers between its two passes over them. Rows longer
than MAX_COLUMNS are processed by the `long` kernels chunk by chunk; they read a row from memory
once, then from the L2 cache.

Backward sums the gradients of weight and bias over each program's rows in order, then over the
programs.
"""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from fusedseq.kernels import launch, philox, row_tiles

OP = "residual_layer_norm"
MAX_COLUMNS = 4096  # of a tile
# Elements of a tile of short rows, 4 for each thread. With twice as many, backward spills on sm_80.
ELEMENTS = 512
UNSPECIALIZED = ["M", "threshold"]


class Dropout(NamedTuple):
    """The arguments of the dropout mask; they are not read if there is no dropout."""

    seed: Any  # (1,) int64
    threshold: Any  # see philox.threshold
    scale: Any  # factor of the elements that are kept


class Tile(NamedTuple):
    """The position of an (R, N) tile of the matrices."""

    row: Any  # (R,) int64
    column: Any  # the first column
    columns: Any  # (N,)
    offset: Any  # (R, N) int64, of each element
    inside: Any  # (R, N) or (1, N), whether it is inside of the matrix


@triton.jit
def tile_of_rows(row, M, D, N: tl.constexpr):
    """Returns the Tile of whole rows."""
    columns = tl.arange(0, N)
    inside = (row < M)[:, None] & (columns < D)[None, :]
    return Tile(row, 0, columns, row[:, None] * D + columns[None, :], inside)


@triton.jit
def tile_of_chunk(row, column, D, N: tl.constexpr):
    """Returns the Tile of columns column : column + N of rows that exist."""
    columns = column + tl.arange(0, N)
    inside = (columns < D)[None, :]
    return Tile(row, column, columns, row[:, None] * D + columns[None, :], inside)


@triton.jit
def load(p, offset, inside):
    """Returns elements in fp32; 0 where not inside."""
    return tl.load(p + offset, mask=inside, other=0.0).to(tl.float32)


@triton.jit
def apply_dropout(s, tile, dropout, D, N: tl.constexpr):
    keep = row_tiles.keep_mask(dropout.seed, tile.row, tile.column, D, dropout.threshold, N)
    return tl.where(keep, s * dropout.scale, 0.0)


@triton.jit
def residual_sum(x, residual, tile, dropout, D, DROPOUT: tl.constexpr, N: tl.constexpr):
    """Returns a tile of s = residual + dropout(x); 0 where not inside."""
    s = load(x, tile.offset, tile.inside)
    if DROPOUT:
        s = apply_dropout(s, tile, dropout, D, N)
    if residual is not None:
        s += load(residual, tile.offset, tile.inside)
    return s


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
    Not timed on a GPU.
    """
    dropout = Dropout(seed, threshold, scale)
    row = tl.program_id(0).to(tl.int64) * R + tl.arange(0, R)
    tile = tile_of_rows(row, M, D, N)
    s = residual_sum(x, residual, tile, dropout, D, DROPOUT, N)
    if s_out is not None:  # y is the norm of the s that is returned, which may have been rounded
        rounded = s.to(s_out.dtype.element_ty)
        tl.store(s_out + tile.offset, rounded, mask=tile.inside)
        s = rounded.to(tl.float32)

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
        total += tl.sum(residual_sum(x, residual, tile, dropout, D, DROPOUT, N), 1)
    mean = total / D

    # Pass 2: the variance, of centered elements as in forward_kernel.
    squares = tl.zeros((R,), tl.float32)
    for column in range(0, D, N):
        tile = tile_of_chunk(row, column, D, N)
        s = residual_sum(x, residual, tile, dropout, D, DROPOUT, N)
        centered = tl.where(tile.inside, s - mean[:, None], 0.0)
        squares += tl.sum(centered * centered, 1)
    rstd = 1 / tl.sqrt(squares / D + eps)

    # Pass 3: the results.
    for column in range(0, D, N):
        tile = tile_of_chunk(row, column, D, N)
        s = residual_sum(x, residual, tile, dropout, D, DROPOUT, N)
        if s_out is not None:
            tl.store(s_out + tile.offset, s.to(s_out.dtype.element_ty), mask=tile.inside)
        out = normalized(s, mean, rstd, weight, bias, tile.columns, D)
        tl.store(y + tile.offset, out.to(y.dtype.element_ty), mask=tile.inside)
    tl.store(mean_out + row, mean)
    tl.store(rstd_out + row, rstd)


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
    per tile, which spills on sm_80. Not timed on a GPU.
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


def configuration(D):
    """Returns (whether the long kernels are used, {R, N}, warps) for rows of D columns."""
    if D > MAX_COLUMNS:
        return True, {"R": 1, "N": 4096}, 8
    R, N = row_tiles.tile_shape(D, ELEMENTS, MAX_COLUMNS)
    return False, {"R": R, "N": N}, max(4, N // 256)


def residual_layer_norm(x, residual, weight, bias, p, eps, prenorm, seed):
    """Returns y, s (empty unless prenorm), mean and rstd.

    x, residual, y, s: (..., D)    weight, bias: (D,)    mean, rstd: (M,) fp32    residual, weight,
    bias: or None
    """
    x, residual, weight, bias = row_tiles.contiguous(x, residual, weight, bias)
    D = x.size(-1)
    M = x.numel() // D
    y, s = torch.empty_like(x), torch.empty_like(x) if prenorm else x.new_empty(0)
    mean, rstd = x.new_empty(M, dtype=torch.float32), x.new_empty(M, dtype=torch.float32)
    is_long, tile, warps = configuration(D)
    launch.run(
        long_forward_kernel if is_long else forward_kernel,
        triton.cdiv(M, tile["R"]),
        *(x, residual, weight, bias, y, s if prenorm else None, mean, rstd),
        *(seed, M, D, philox.threshold(p), philox.scale(p), eps),
        DROPOUT=p > 0,
        **tile,
        warps=warps,
    )
    return y, s, mean, rstd


def residual_layer_norm_backward(dy, ds, x, residual, weight, s, mean, rstd, p, seed, needs):
    """Returns dx, dresidual, dweight, dbias, for the bits 1, 2, 4, 8 of `needs`; empty tensors in
    place of the others.

    s: saved by a pre-norm forward, or None; x and residual are not read then, except for shape and
    dtype
    """
    dy, ds, x, residual, weight, s = row_tiles.contiguous(dy, ds, x, residual, weight, s)
    D = x.size(-1)
    M = x.numel() // D
    dx, dresidual = (torch.empty_like(x) if needs & bit else None for bit in (1, 2))
    is_long, tile, warps = configuration(D)
    programs = min(triton.cdiv(M, tile["R"]), row_tiles.PROGRAMS)
    allocate = torch.zeros if is_long else torch.empty
    sums = allocate((needs >> 2).bit_count(), programs, D, dtype=torch.float32, device=x.device)
    partial = iter(sums)
    dweight, dbias = (next(partial) if needs & bit else None for bit in (4, 8))
    launch.run(
        long_backward_kernel if is_long else backward_kernel,
        programs,
        *(dy, ds, x if s is None else s, residual if s is None else None, weight, mean, rstd),
        *(dx, dresidual, dweight, dbias),
        *(seed, M, D, philox.threshold(p), philox.scale(p)),
        DROPOUT=p > 0,
        SUMMED=s is not None,
        **tile,
        warps=warps,
    )
    # In fp32 as many sums as there are results; else one sum, and a conversion for each result.
    if x.dtype == torch.float32:
        totals = (part.sum(0) for part in sums)
    else:
        totals = (total.to(x.dtype) for total in sums.sum(1))
    return (
        x.new_empty(0) if dx is None else dx,
        x.new_empty(0) if dresidual is None else dresidual,
        *(next(totals) if needs & bit else x.new_empty(0) for bit in (4, 8)),
    )


def explain(x, *args, **kwargs):
    """Returns which kernel a call runs, and why."""
    D = x.size(-1)
    how = f"rows of {D} in chunks" if D > MAX_COLUMNS else "rows in registers"
    return f"kernels/residual_layer_norm.py; {how}, one pass over memory each way"
