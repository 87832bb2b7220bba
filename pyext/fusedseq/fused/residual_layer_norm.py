import torch

from fusedseq import reference
from fusedseq.fused import autograd, check

OP = "residual_layer_norm"


def residual_layer_norm(x, residual=None, weight=None, bias=None, *, p=0.0, eps=1e-5, prenorm=False, seed=0):
    """As `fusedseq.reference.residual_layer_norm`. One pass forward and one backward; the mask is made on the way in both.

    Post-norm keeps x and residual for the backward, prenorm s alone. Gradients of weight and bias do not depend on the
    number of threads. bf16 is computed in fp32. Under autocast fp32 and lower tensors may be mixed, and the result has
    the wider dtype, as torch's sum has.
    Errors: ValueError for shapes, devices, p outside [0, 1], a negative eps; TypeError for other dtypes than fp32, bf16,
    on a CPU fp64, on CUDA fp16, or two of them.
    """
    if (found := autograd.unchecked(OP, x, residual, weight, bias, p, eps, prenorm, seed)) is not NotImplemented:
        return found[:2] if prenorm else found[0]
    check.tensor(OP, "x", x)
    x, residual, weight, bias = autograd.widest(x.device.type, x, residual, weight, bias)
    check.like(OP, x, "x", ("residual", "weight", "bias"), check.TRITON, residual=residual, weight=weight, bias=bias)
    if x.dim() == 0 or x.size(-1) == 0:
        raise ValueError(f"{OP}: x must be (..., D), D at least 1, got {tuple(x.shape)}")
    if residual is not None:
        check.shape(OP, "residual", residual, "(..., D)", x.shape)
    for name, value in (("weight", weight), ("bias", bias)):
        if value is not None:
            check.shape(OP, name, value, "(D,)", x.shape[-1:])
    check.probability(OP, "p", p)
    if not eps >= 0:
        raise ValueError(f"{OP}: eps must be at least 0, got {eps}")
    seed = check.seed(OP, seed, x.device)
    y, s, *_ = autograd.call("residual_layer_norm", x, residual, weight, bias, p, eps, prenorm, seed)
    return (y, s) if prenorm else y


def setup(ctx, inputs, output):
    x, residual, weight, bias, ctx.p, ctx.eps, ctx.prenorm, seed = inputs
    _, s, mean, rstd = output
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(mean, rstd)
    kept = (None, None, s) if ctx.prenorm else (x, residual, None)
    ctx.save_for_backward(*kept, weight, bias, seed, mean, rstd)


def backward(ctx, dy, ds, *_):
    x, residual, s, weight, bias, seed, mean, rstd = ctx.saved_tensors
    needs = ctx.needs_input_grad[:4]
    ds = ds if ctx.prenorm else None  # not of the empty tensor in its place
    if dy is None and ds is None:
        return (None,) * 8
    if torch.is_grad_enabled():
        grads = through_s(ctx, dy, ds) if ctx.prenorm else through_inputs(ctx, dy)
        return *grads, None, None, None, None
    if ctx.prenorm:
        x = s
    dy = torch.zeros_like(x) if dy is None else dy
    # Without dropout both gradients of the sum are the same tensor.
    same = ctx.p == 0 and needs[0] and needs[1]
    bits = sum(1 << i for i, need in enumerate(needs) if need and not (same and i == 0))
    dx, *others = torch.ops.fusedseq.residual_layer_norm_backward(
        dy, ds, x, residual, weight, s, mean, rstd, ctx.p, seed, bits
    )
    grads = (others[0] if same else dx, *others)
    return *(g if need else None for g, need in zip(grads, needs, strict=True)), None, None, None, None


def through_inputs(ctx, dy):
    """The gradients of x, residual, weight, bias, differentiable again: see `autograd.through_oracle`."""
    x, residual, _, weight, bias, seed, *_ = ctx.saved_tensors

    def oracle(x, residual, weight, bias):
        return reference.residual_layer_norm(x, residual, weight, bias, p=ctx.p, eps=ctx.eps, seed=seed)

    return autograd.through_oracle(oracle, [x, residual, weight, bias], ctx.needs_input_grad[:4], [dy])


def through_s(ctx, dy, ds):
    """The same where s was kept: it is a result of this very operator, and so knows x and residual."""
    _, _, s, weight, bias, seed, *_ = ctx.saved_tensors
    need_x, need_residual, *needs = ctx.needs_input_grad[:4]

    def oracle(s, weight, bias):
        return reference.residual_layer_norm(s, None, weight, bias, eps=ctx.eps, prenorm=True)

    total, *others = autograd.through_oracle(oracle, [s, weight, bias], [True, *needs], [dy, ds])
    dx = torch.ops.fusedseq.dropout(total, ctx.p, seed) if need_x and ctx.p else total
    return dx if need_x else None, total if need_residual else None, *others


def fake(x, residual, weight, bias, p, eps, prenorm, seed):
    wide = torch.float64 if x.dtype == torch.float64 else torch.float32
    rows = x.numel() // x.size(-1)
    y = torch.empty_like(x, memory_format=torch.contiguous_format)
    s = torch.empty_like(y) if prenorm else x.new_empty(0)
    return y, s, x.new_empty(rows, dtype=wide), x.new_empty(rows, dtype=wide)


def fake_backward(dy, ds, x, residual, weight, s, mean, rstd, p, seed, needs):
    D = x.shape[-1:]
    shapes = (x.shape, x.shape, D, D)
    return tuple(x.new_empty(shape if needs >> i & 1 else (0,)) for i, shape in enumerate(shapes))


autograd.register(OP, fake, backward, setup, fakes=[(f"{OP}_backward", fake_backward)])
