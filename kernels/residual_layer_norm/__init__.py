"""residual + dropout(x), LayerNorm over it, and the gradients of both.

A program processes some rows, which stay in registers between its two passes over them. Rows longer
than MAX_COLUMNS are processed by the `long` kernels chunk by chunk; they read a row from memory
once, then from the L2 cache.

Backward sums the gradients of weight and bias over each program's rows in order, then over the
programs.
"""

import torch
import triton
from fusedseq.kernels import launch, philox, row_tiles, shapes
from fusedseq.kernels.residual_layer_norm.backward import backward_kernel, long_backward_kernel
from fusedseq.kernels.residual_layer_norm.forward import forward_kernel, long_forward_kernel

MAX_COLUMNS = 4096  # of a tile
# Elements of a tile of short rows, 4 for each thread. With twice as many, backward spills on sm_80.
ELEMENTS = 512


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
    D = x.size(-1)
    parameters = {"weight": (weight, (D,)), "bias": (bias, (D,))}
    shapes.require("residual_layer_norm", residual=(residual, x.shape), **parameters)
    x, residual, weight, bias = row_tiles.contiguous(x, residual, weight, bias)
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
    D = x.size(-1)
    M = x.numel() // D
    like_x = {"dy": dy, "ds": ds, "residual": residual, "s": s}
    shapes.require(
        "residual_layer_norm_backward",
        **{name: (t, x.shape) for name, t in like_x.items()},
        weight=(weight, (D,)),
        mean=(mean, (M,)),
        rstd=(rstd, (M,)),
    )
    dy, ds, x, residual, weight, s = row_tiles.contiguous(dy, ds, x, residual, weight, s)
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
    return f"kernels/residual_layer_norm; {how}, one pass over memory each way"
