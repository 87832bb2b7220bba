"""dropout(activation(x + b)) and its gradients.

A program processes some rows of a range of columns. Backward recomputes the activation from x, so
that nothing but x is saved. Each program sums its rows' gradients for b in order, then one sum over
the programs follows.
"""

import torch
import triton
import triton.language as tl
from fusedseq.kernels import launch, philox, row_tiles, shapes

OP = "bias_activation_dropout"
MAX_COLUMNS = 1024  # of a tile
ELEMENTS = 1024  # of a tile, 8 for each thread
UNSPECIALIZED = ["M", "threshold"]


@triton.jit
def tanh(x):
    """tanh by exp; by its series near 0, where the exponential form cancels."""
    u = x * x
    small = x * (1 - u * (0.33333333 - u * (0.13333333 - u * 0.05396825)))
    return tl.where(tl.abs(x) < 0.2, small, 1 - 2 / (tl.exp(2 * x) + 1))


@triton.jit
def gelu_inner(x):
    """The inner function of gelu's tanh approximation."""
    return tanh(0.7978845608 * (x + 0.044715 * x * x * x))


@triton.jit
def activate(x, ACTIVATION: tl.constexpr):
    """Returns activation(x)."""
    if ACTIVATION == "relu":
        return tl.where(x < 0, 0.0, x)  # NaN stays
    elif ACTIVATION == "gelu":
        return x * 0.5 * (1 + tl.erf(x * 0.7071067812))
    elif ACTIVATION == "gelu_tanh":
        return 0.5 * x * (1 + gelu_inner(x))
    else:
        return tanh(x)


@triton.jit
def gradient(x, dy, ACTIVATION: tl.constexpr):
    """Returns the gradient of x from dy, that of the activation. As torch's, relu's is dy where x
    is NaN, and 0 at x <= 0 also where dy is infinite."""
    if ACTIVATION == "relu":
        return tl.where(x <= 0, 0.0, dy)
    elif ACTIVATION == "gelu":
        below = 0.5 * (1 + tl.erf(x * 0.7071067812))
        return dy * (below + x * 0.3989422804 * tl.exp(-0.5 * x * x))
    elif ACTIVATION == "gelu_tanh":
        y = gelu_inner(x)
        return dy * 0.5 * (1 + y + x * (1 - y * y) * 0.7978845608 * (1 + 0.134145 * x * x))
    else:
        y = tanh(x)
        return dy * (1 - y * y)


@triton.jit
def load_biased(x, b, offset, inside, columns, D):
    """Returns x + b of a tile in fp32."""
    z = tl.load(x + offset, mask=inside, other=0.0).to(tl.float32)
    if b is not None:
        z += tl.load(b + columns, mask=columns < D, other=0.0).to(tl.float32)[None, :]
    return z


@triton.jit(do_not_specialize=UNSPECIALIZED)
def forward_kernel(
    x,  # (M, D)
    b,  # (D,) or None
    y,  # (M, D)
    seed,  # (1,) int64, read if DROPOUT
    M,
    D,
    threshold,  # see philox.threshold
    scale,  # factor of the elements that dropout keeps
    ACTIVATION: tl.constexpr,
    DROPOUT: tl.constexpr,
    R: tl.constexpr,  # rows of a tile
    N: tl.constexpr,  # columns of a tile
):
    """Computes y. A program owns an (R, N) tile.

    It moves 2 M D elements: 22 us for (5760, 2048) in fp32 on an H200 at 4.3 TB/s, 11 us in bf16.
    Memory bandwidth is the limit in fp32: Philox, 18 integer instructions per element, and the
    activation, up to about 30 FLOP, overlap with it.
    Timed on an H200: docs/gpu-kernels.md.
    """
    chunks = tl.cdiv(D, N)
    row = (tl.program_id(0) // chunks).to(tl.int64) * R + tl.arange(0, R)
    column = tl.program_id(0) % chunks * N
    columns = column + tl.arange(0, N)
    inside = (row < M)[:, None] & (columns < D)[None, :]
    offset = row[:, None] * D + columns[None, :]

    out = activate(load_biased(x, b, offset, inside, columns, D), ACTIVATION)
    if DROPOUT:
        keep = row_tiles.keep_mask(seed, row, column, D, threshold, N)
        out = tl.where(keep, out * scale, 0.0)
    tl.store(y + offset, out.to(y.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=UNSPECIALIZED)
def backward_kernel(
    dy,  # (M, D)
    x,  # (M, D)
    b,  # (D,) or None
    dx,  # (M, D), None where not needed
    db,  # (programs of a range of columns, D) fp32, None where not needed
    seed,  # (1,) int64, read if DROPOUT
    M,
    D,
    threshold,  # see philox.threshold
    scale,  # factor of the elements that dropout keeps
    ACTIVATION: tl.constexpr,
    DROPOUT: tl.constexpr,
    R: tl.constexpr,  # rows of a tile
    N: tl.constexpr,  # columns of a tile
):
    """Computes dx and the partial sums db. A program owns N columns of every n-th tile of rows, n
    the number of such programs.

    It moves 3 M D elements: 33 us for (5760, 2048) in fp32 on an H200 at 4.3 TB/s, 17 us in bf16,
    and up to 512 rows of D partial sums: 2 us. Memory bandwidth is the limit.
    Timed on an H200: docs/gpu-kernels.md.
    """
    chunks = tl.cdiv(D, N)
    program = tl.program_id(0) // chunks
    column = tl.program_id(0) % chunks * N
    columns = column + tl.arange(0, N)
    b_sum = tl.zeros((R, N), tl.float32)
    for tile in range(program, tl.cdiv(M, R), tl.num_programs(0) // chunks):
        row = (tile * R + tl.arange(0, R)).to(tl.int64)
        inside = (row < M)[:, None] & (columns < D)[None, :]
        offset = row[:, None] * D + columns[None, :]

        # The gradient of dropout(activation(x + b)); the mask is recomputed from the seed.
        d = tl.load(dy + offset, mask=inside, other=0.0).to(tl.float32)
        d = gradient(load_biased(x, b, offset, inside, columns, D), d, ACTIVATION)
        if DROPOUT:
            keep = row_tiles.keep_mask(seed, row, column, D, threshold, N)
            d = tl.where(keep, d * scale, 0.0)
        if dx is not None:
            tl.store(dx + offset, d.to(dx.dtype.element_ty), mask=inside)
        b_sum += d
    if db is not None:
        tl.store(db + program.to(tl.int64) * D + columns, tl.sum(b_sum, 0), mask=columns < D)


def prepare(x, b):
    """Returns x and b contiguous, M, D, the number of ranges of columns, and the constants of the
    tile."""
    D = x.size(-1)
    shapes.require("bias_activation_dropout", b=(b, (D,)))
    R, N = row_tiles.tile_shape(D, ELEMENTS, MAX_COLUMNS)
    x, b = row_tiles.contiguous(x, b)
    return x, b, x.numel() // max(D, 1), D, triton.cdiv(D, N), {"R": R, "N": N}


def bias_activation_dropout(x, b, activation, p, seed):
    """Returns y in the shape of x.    x: (..., D)    b: (D,) or None"""
    x, b, M, D, chunks, tile = prepare(x, b)
    y = torch.empty_like(x)
    launch.run(
        forward_kernel,
        triton.cdiv(M, tile["R"]) * chunks,
        *(x, b, y, seed, M, D, philox.threshold(p), philox.scale(p)),
        ACTIVATION=activation,
        DROPOUT=p > 0,
        **tile,
        warps=4,
    )
    return y


def bias_activation_dropout_backward(dy, x, b, activation, p, seed, needs):
    """Returns dx and db, for the bits 1 and 2 of `needs`; empty tensors in place of the others."""
    shapes.require("bias_activation_dropout_backward", dy=(dy, x.shape))
    x, b, M, D, chunks, tile = prepare(x, b)
    programs = min(triton.cdiv(M, tile["R"]), max(1, row_tiles.PROGRAMS // max(chunks, 1)))
    dx = torch.empty_like(x) if needs & 1 else None
    db = torch.empty(programs, D, dtype=torch.float32, device=x.device) if needs & 2 else None
    launch.run(
        backward_kernel,
        programs * chunks,
        *(dy.contiguous(), x, b, dx, db, seed, M, D, philox.threshold(p), philox.scale(p)),
        ACTIVATION=activation,
        DROPOUT=p > 0,
        **tile,
        warps=4,
    )
    return (
        x.new_empty(0) if dx is None else dx,
        x.new_empty(0) if db is None else db.sum(0).to(x.dtype),
    )


def explain(*args, **kwargs):
    """Returns which kernel a call runs, and why."""
    return "kernels/bias_activation_dropout.py; one pass, the backward from x again"
