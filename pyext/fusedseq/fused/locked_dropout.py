import torch
from torch import Tensor

from fusedseq import reference
from fusedseq.fused import autograd, check
from fusedseq.fused.gradient import Gradient
from fusedseq.fused.schema import Gradients, Named
from fusedseq.fused.through_oracle import call_reference

OP = "locked_dropout"


def locked_dropout(x: Tensor, p: float, seed: int | Tensor) -> Tensor:
    """Computes `fusedseq.reference.locked_dropout` in one pass over x; the (B, D) mask is
    recomputed in backward.

    Errors: ValueError for p outside [0, 1] or an x that is not (T, B, D); TypeError for a dtype
    other than fp32, fp64, bf16, and fp16 on CUDA.
    """
    check.like(OP, x, "x")
    check.dimensions(OP, "x", x, "(T, B, D)")
    check.probability(OP, "p", p)
    if p == 0:
        return x.clone()
    y: Tensor = autograd.call(OP, x, p, check.seed(OP, seed, x.device))
    return y


def fake(named: Named) -> Tensor:
    return torch.empty_like(named["x"], memory_format=torch.contiguous_format)


def gradient(named: Named, grads: Gradients, needed: frozenset[str]) -> Gradients:
    """The operator is linear in x, so its gradient is the operator itself, which can be
    differentiated again.
    """
    return {"x": autograd.call(OP, grads["y"], named["p"], named["seed"])}


autograd.register(
    OP,
    fake,
    Gradient(
        results=("y",),
        oracle=lambda named: call_reference(reference.locked_dropout, named),
        saves=("seed",),
        compute=gradient,
        is_linear=True,
    ),
)
