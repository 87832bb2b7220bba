from typing import Any

import torch
from torch import Tensor

from fusedseq import reference
from fusedseq.fused import autocast, autograd, check
from fusedseq.fused.gradient import Gradient, call_backward
from fusedseq.fused.schema import Gradients, Named
from fusedseq.fused.through_oracle import call_reference, through_oracle

OP = "residual_layer_norm"
INPUTS = ("x", "residual", "weight", "bias")  # that have gradients


def residual_layer_norm(
    x: Tensor,
    residual: Tensor | None = None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    *,
    p: float = 0.0,
    eps: float = 1e-5,
    prenorm: bool = False,
    seed: int | Tensor = 0,
) -> Tensor | tuple[Tensor, Tensor]:
    """Computes `fusedseq.reference.residual_layer_norm` with one pass over memory forward and one
    backward; the mask is recomputed in backward.

    Post-norm saves x and residual for backward, pre-norm only their sum s. The gradients of weight
    and bias do not depend on the number of threads. bf16 is computed in fp32. Under autocast the
    tensors may have different dtypes, and the result has the widest of them, as torch's sum has.

    Any size may be 0. With D = 0 there is nothing to normalize, and
    `fusedseq.reference.residual_layer_norm` gives the empty result.

    Errors: ValueError for a wrong shape or device, p outside [0, 1] or a negative eps; TypeError
    for tensors of two dtypes, or of a dtype other than fp32, bf16, fp64 (CPU) and fp16 (CUDA).
    """
    found: tuple[Tensor, ...] = autograd.call_if_valid(
        OP, x, residual, weight, bias, p, eps, prenorm, seed
    )
    if found is not NotImplemented:
        return (found[0], found[1]) if prenorm else found[0]
    check.tensor(OP, "x", x)
    x, residual, weight, bias = autocast.promote(x.device.type, x, residual, weight, bias)
    others = {"residual": residual, "weight": weight, "bias": bias}
    check.like(OP, x, "x", ("residual", "weight", "bias"), check.TRITON, **others)
    if x.dim() == 0:
        raise ValueError(f"{OP}: x must be (..., D), got {tuple(x.shape)}")
    if residual is not None:
        check.shape(OP, "residual", residual, "(..., D)", x.shape)
    for name, value in (("weight", weight), ("bias", bias)):
        if value is not None:
            check.shape(OP, name, value, "(D,)", x.shape[-1:])
    check.probability(OP, "p", p)
    check.at_least_zero(OP, "eps", eps)
    check.flag(OP, "prenorm", prenorm)
    seed = check.seed(OP, seed, x.device)
    if x.size(-1) == 0:
        return reference.residual_layer_norm(
            x, residual, weight, bias, p=p, eps=eps, prenorm=prenorm, seed=seed
        )
    y, s, *_ = autograd.call(OP, x, residual, weight, bias, p, eps, prenorm, seed)
    return (y, s) if prenorm else y


def unsaved(named: Named) -> tuple[str, ...]:
    """Pre-norm saves s in place of x and residual; post-norm has no s."""
    return ("x", "residual") if named["prenorm"] else ("s",)


def gradient(named: Named, grads: Gradients, needed: frozenset[str]) -> Gradients:
    x = named["s"] if named["prenorm"] else named["x"]
    dy = torch.zeros_like(x) if grads["y"] is None else grads["y"]
    ds = grads["s"] if named["prenorm"] else None  # else it is the gradient of an empty tensor
    # Without dropout, x and residual have the same gradient: it is computed once.
    is_shared = named["p"] == 0 and "x" in needed and "residual" in needed
    computed = needed - {"x"} if is_shared else needed
    found = call_backward(
        "residual_layer_norm_backward", named | {"x": x}, {"y": dy, "s": ds}, computed
    )
    return found | {"x": found["residual"]} if is_shared else found


def higher(named: Named, grads: Gradients, needed: frozenset[str]) -> Gradients:
    if not named["prenorm"]:
        return through_oracle(oracle, named, {"y": grads["y"]}, needed)
    # s is a result of this operator, so that the gradients of x and residual follow from the
    # gradient of s.
    inputs = {name: named[name] for name in ("s", "weight", "bias", "eps", "prenorm")}
    found = through_oracle(oracle_of_s, inputs, grads, needed | {"s"})
    total, p = found["s"], named["p"]
    dx = autograd.call("dropout", total, p, named["seed"]) if p and "x" in needed else total
    return found | {"x": dx, "residual": total}


def oracle(named: Named) -> Any:
    return call_reference(reference.residual_layer_norm, named)


def oracle_of_s(named: Named) -> Any:
    return oracle(named | {"x": named["s"]})


def fake(named: Named) -> tuple[Tensor, ...]:
    x = named["x"]
    computing = torch.float64 if x.dtype == torch.float64 else torch.float32
    rows = x.numel() // x.size(-1)
    y = torch.empty_like(x, memory_format=torch.contiguous_format)
    s = torch.empty_like(y) if named["prenorm"] else x.new_empty(0)
    return y, s, x.new_empty(rows, dtype=computing), x.new_empty(rows, dtype=computing)


def new_gradient(named: Named, name: str) -> Tensor:
    x: Tensor = named["x"]
    return x.new_empty(x.shape if name in ("x", "residual") else x.shape[-1:])


autograd.register(
    OP,
    fake,
    Gradient(
        results=("y", "s"),
        oracle=oracle,
        backwards=("residual_layer_norm_backward",),
        unsaved=unsaved,
        compute=gradient,
        higher=higher,
    ),
)
autograd.register_fake_backward(OP, new_gradient)
