"""residual + dropout(x) and LayerNorm over it: a program for some rows, which stay in registers between its two passes.

Where a row is longer than WIDEST the `long` kernels take it chunk by chunk, from the L2 cache after the first time.
A backward's gradients of weight and bias are sums of a program's rows, in order, then one sum over the programs.
"""

import torch
import triton
import triton.language as tl
from fusedseq.kernels import launch, philox, rows

OP = "residual_layer_norm"
WIDEST = 4096  # columns
ELEMENTS = 512  # of a tile of short rows, 4 in a thread: with twice as many a backward spills on an A100
NOT_CONSTANT = ["M", "threshold"]


@triton.jit
def load(p, at, inside):
    """Elements in fp32, 0 outside the row."""
    return tl.load(p + at, mask=inside, other=0.0).to(tl.float32)


@triton.jit
def residual_sum(
    x, residual, seed, row, column, at, inside, D, threshold, scale, DROPOUT: tl.constexpr, N: tl.constexpr
):
    """A tile of residual + dropout(x), 0 outside the row."""
    s = load(x, at, inside)
    if DROPOUT:
        s = tl.where(rows.kept(seed, row, column, D, threshold, N), s * scale, 0.0)
    if residual is not None:
        s += load(residual, at, inside)
    return s


@triton.jit
def normalized(s, mean, rstd, weight, bias, columns, D):
    y = (s - mean[:, None]) * rstd[:, None]
    if weight is not None:
        y *= load(weight, columns, columns < D)[None, :]
    if bias is not None:
        y += load(bias, columns, columns < D)[None, :]
    return y


@triton.jit(do_not_specialize=NOT_CONSTANT)
def forward_kernel(
    x, residual, weight, bias, y, s_out, mean_out, rstd_out, seed, M, D, threshold, scale, eps,
    DROPOUT: tl.constexpr, R: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    """x, residual, y, s_out: (M, D)    weight, bias: (D,)    mean_out, rstd_out: (M,) float32    None where not given

    Post-norm moves 3 M D elements, prenorm 4 M D: 8.8 us for post-norm of (12288, 256) in fp32 on an H200 at 4.3 TB/s.
    Arithmetic, some 10 M D FLOP, hides behind it; Philox, 18 integer instructions an element, 57 million here, does too
    (some 2 us). Not timed.
    """
    row = tl.program_id(0).to(tl.int64) * R + tl.arange(0, R)
    columns = tl.arange(0, N)
    inside = (row < M)[:, None] & (columns < D)[None, :]
    at = row[:, None] * D + columns[None, :]
    s = residual_sum(x, residual, seed, row, 0, at, inside, D, threshold, scale, DROPOUT, N)
    if s_out is not None:  # y is the norm of the s that is given out, also where that is rounded
        rounded = s.to(s_out.dtype.element_ty)
        tl.store(s_out + at, rounded, mask=inside)
        s = rounded.to(tl.float32)
    mean = tl.sum(s, 1) / D
    centered = tl.where(inside, s - mean[:, None], 0.0)
    rstd = 1 / tl.sqrt(tl.sum(centered * centered, 1) / D + eps)
    out = normalized(s, mean, rstd, weight, bias, columns, D)
    tl.store(y + at, out.to(y.dtype.element_ty), mask=inside)
    tl.store(mean_out + row, mean, mask=row < M)
    tl.store(rstd_out + row, rstd, mask=row < M)


@triton.jit(do_not_specialize=NOT_CONSTANT)
def long_forward_kernel(
    x, residual, weight, bias, y, s_out, mean_out, rstd_out, seed, M, D, threshold, scale, eps,
    DROPOUT: tl.constexpr, R: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    """A row longer than N, R = 1, three times over it: arguments and bytes of memory as in `forward_kernel`. Philox is
    computed three times, 54 instructions an element. Not timed."""
    row = tl.program_id(0).to(tl.int64) + tl.arange(0, R)
    total = tl.zeros((R,), tl.float32)
    for column in range(0, D, N):
        columns = column + tl.arange(0, N)
        inside = (columns < D)[None, :]
        at = row[:, None] * D + columns[None, :]
        total += tl.sum(residual_sum(x, residual, seed, row, column, at, inside, D, threshold, scale, DROPOUT, N), 1)
    mean = total / D
    squares = tl.zeros((R,), tl.float32)
    for column in range(0, D, N):
        columns = column + tl.arange(0, N)
        inside = (columns < D)[None, :]
        at = row[:, None] * D + columns[None, :]
        s = residual_sum(x, residual, seed, row, column, at, inside, D, threshold, scale, DROPOUT, N)
        centered = tl.where(inside, s - mean[:, None], 0.0)
        squares += tl.sum(centered * centered, 1)
    rstd = 1 / tl.sqrt(squares / D + eps)
    for column in range(0, D, N):
        columns = column + tl.arange(0, N)
        inside = (columns < D)[None, :]
        at = row[:, None] * D + columns[None, :]
        s = residual_sum(x, residual, seed, row, column, at, inside, D, threshold, scale, DROPOUT, N)
        if s_out is not None:
            tl.store(s_out + at, s.to(s_out.dtype.element_ty), mask=inside)
        out = normalized(s, mean, rstd, weight, bias, columns, D)
        tl.store(y + at, out.to(y.dtype.element_ty), mask=inside)
    tl.store(mean_out + row, mean)
    tl.store(rstd_out + row, rstd)


@triton.jit
def store_gradients(
    d, ds, dx, dresidual, seed, row, column, at, inside, D, threshold, scale, DROPOUT: tl.constexpr, N: tl.constexpr
):
    """d: of the sum, without what comes from above by prenorm, ds."""
    if ds is not None:
        d += load(ds, at, inside)
    if dresidual is not None:
        tl.store(dresidual + at, d.to(dresidual.dtype.element_ty), mask=inside)
    if dx is not None:
        if DROPOUT:
            d = tl.where(rows.kept(seed, row, column, D, threshold, N), d * scale, 0.0)
        tl.store(dx + at, d.to(dx.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=NOT_CONSTANT)
def backward_kernel(
    dy, ds, x, residual, weight, mean_in, rstd_in, dx, dresidual, dweight, dbias, seed, M, D, threshold, scale,
    DROPOUT: tl.constexpr, SUMMED: tl.constexpr, R: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    """dy, ds, x, residual, dx, dresidual: (M, D); with SUMMED x is s itself    dweight, dbias: (programs, D) float32

    Moves 5 M D elements, post-norm or prenorm: 14.6 us for (12288, 256) in fp32 on an H200 at 4.3 TB/s, and 1 MB of
    partial sums, written and read: .5 us. Some 20 M D FLOP and twice the mask in post-norm, once in prenorm. Not timed.
    """
    columns = tl.arange(0, N)
    w_sum = tl.zeros((R, N), tl.float32)
    b_sum = tl.zeros((R, N), tl.float32)
    for tile in range(tl.program_id(0), tl.cdiv(M, R), tl.num_programs(0)):
        row = (tile * R + tl.arange(0, R)).to(tl.int64)
        inside = (row < M)[:, None] & (columns < D)[None, :]
        at = row[:, None] * D + columns[None, :]
        mean = tl.load(mean_in + row, mask=row < M, other=0.0)
        rstd = tl.load(rstd_in + row, mask=row < M, other=0.0)
        d = load(dy, at, inside)
        s = residual_sum(x, residual, seed, row, 0, at, inside, D, threshold, scale, DROPOUT and not SUMMED, N)
        n = tl.where(inside, (s - mean[:, None]) * rstd[:, None], 0.0)
        if dweight is not None:
            w_sum += d * n
        if dbias is not None:
            b_sum += d
        if weight is not None:
            d *= load(weight, columns, columns < D)[None, :]
        if dx is not None or dresidual is not None:
            of_s = (d - (tl.sum(d, 1) / D)[:, None] - n * (tl.sum(d * n, 1) / D)[:, None]) * rstd[:, None]
            store_gradients(of_s, ds, dx, dresidual, seed, row, 0, at, inside, D, threshold, scale, DROPOUT, N)
    at = tl.program_id(0).to(tl.int64) * D + columns
    if dweight is not None:
        tl.store(dweight + at, tl.sum(w_sum, 0), mask=columns < D)
    if dbias is not None:
        tl.store(dbias + at, tl.sum(b_sum, 0), mask=columns < D)


@triton.jit
def add(p, at, value, inside):
    tl.store(p + at, tl.load(p + at, mask=inside, other=0.0) + value, mask=inside)


@triton.jit(do_not_specialize=NOT_CONSTANT)
def long_backward_kernel(
    dy, ds, x, residual, weight, mean_in, rstd_in, dx, dresidual, dweight, dbias, seed, M, D, threshold, scale,
    DROPOUT: tl.constexpr, SUMMED: tl.constexpr, R: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    """Rows longer than N, R = 1, twice over each: arguments and bytes of memory as in `backward_kernel`; but dweight and
    dbias, zeroed, add up in the L2 cache. Not timed."""
    for m in range(tl.program_id(0), M, tl.num_programs(0)):
        row = (m + tl.arange(0, R)).to(tl.int64)
        mean, rstd = tl.load(mean_in + row), tl.load(rstd_in + row)
        d_sum = tl.zeros((R,), tl.float32)
        dn_sum = tl.zeros((R,), tl.float32)
        for column in range(0, D, N):
            columns = column + tl.arange(0, N)
            inside = (columns < D)[None, :]
            at = row[:, None] * D + columns[None, :]
            s = residual_sum(x, residual, seed, row, column, at, inside, D, threshold, scale, DROPOUT and not SUMMED, N)
            n = tl.where(inside, (s - mean[:, None]) * rstd[:, None], 0.0)
            d = load(dy, at, inside)
            of_program = tl.program_id(0).to(tl.int64) * D + columns
            if dweight is not None:
                add(dweight, of_program, tl.sum(d * n, 0), columns < D)
            if dbias is not None:
                add(dbias, of_program, tl.sum(d, 0), columns < D)
            if weight is not None:
                d *= load(weight, columns, columns < D)[None, :]
            d_sum += tl.sum(d, 1)
            dn_sum += tl.sum(d * n, 1)
        tl.debug_barrier()  # before another thread may add to the same sums
        if dx is not None or dresidual is not None:
            for column in range(0, D, N):
                columns = column + tl.arange(0, N)
                inside = (columns < D)[None, :]
                at = row[:, None] * D + columns[None, :]
                s = residual_sum(
                    x, residual, seed, row, column, at, inside, D, threshold, scale, DROPOUT and not SUMMED, N
                )
                n = (s - mean[:, None]) * rstd[:, None]
                d = load(dy, at, inside)
                if weight is not None:
                    d *= load(weight, columns, columns < D)[None, :]
                of_s = (d - (d_sum / D)[:, None] - n * (dn_sum / D)[:, None]) * rstd[:, None]
                store_gradients(of_s, ds, dx, dresidual, seed, row, column, at, inside, D, threshold, scale, DROPOUT, N)


def configuration(D):
    """(long or not, {R, N}, warps) for rows of D."""
    if D > WIDEST:
        return True, {"R": 1, "N": 4096}, 8
    R, N = rows.tile(D, ELEMENTS, WIDEST)
    return False, {"R": R, "N": N}, max(4, N // 256)


def residual_layer_norm(x, residual, weight, bias, p, eps, prenorm, seed):
    x, residual, weight, bias = rows.dense(x, residual, weight, bias)
    D = x.size(-1)
    M = x.numel() // D
    y, s = torch.empty_like(x), torch.empty_like(x) if prenorm else x.new_empty(0)
    mean, rstd = x.new_empty(M, dtype=torch.float32), x.new_empty(M, dtype=torch.float32)
    is_long, tile, warps = configuration(D)
    launch.run(
        long_forward_kernel if is_long else forward_kernel, triton.cdiv(M, tile["R"]), x, residual, weight, bias, y,
        s if prenorm else None, mean, rstd, seed, M, D, philox.threshold(p), philox.scale(p), eps,
        DROPOUT=p > 0, **tile, warps=warps,
    )  # fmt: skip
    return y, s, mean, rstd


def residual_layer_norm_backward(dy, ds, x, residual, weight, s, mean, rstd, p, seed, needs):
    dy, ds, x, residual, weight, s = rows.dense(dy, ds, x, residual, weight, s)
    D = x.size(-1)
    M = x.numel() // D
    dx, dresidual = (torch.empty_like(x) if needs & bit else None for bit in (1, 2))
    is_long, tile, warps = configuration(D)
    programs = min(triton.cdiv(M, tile["R"]), rows.PROGRAMS)
    make = torch.zeros if is_long else torch.empty
    sums = make((needs >> 2).bit_count(), programs, D, dtype=torch.float32, device=x.device)
    partial = iter(sums)
    dweight, dbias = (next(partial) if needs & bit else None for bit in (4, 8))
    launch.run(
        long_backward_kernel if is_long else backward_kernel, programs, dy, ds, x if s is None else s,
        residual if s is None else None, weight, mean, rstd, dx, dresidual, dweight, dbias, seed, M, D,
        philox.threshold(p), philox.scale(p), DROPOUT=p > 0, SUMMED=s is not None, **tile, warps=warps,
    )  # fmt: skip
    fp32 = x.dtype == torch.float32  # then as many sums as there are results; else one, and a copy for each
    totals = (part.sum(0) for part in sums) if fp32 else (total.to(x.dtype) for total in sums.sum(1))
    return (
        x.new_empty(0) if dx is None else dx, x.new_empty(0) if dresidual is None else dresidual,
        *(next(totals) if needs & bit else x.new_empty(0) for bit in (4, 8)),
    )  # fmt: skip


def explain(x, *args, **kwargs):
    D = x.size(-1)
    how = f"rows of {D} in chunks" if D > WIDEST else "rows in registers"
    return f"kernels/residual_layer_norm.py; {how}, one pass over memory each way"
