import torch
from torch import Tensor

from fusedseq import reference
from fusedseq.fused import autograd, check
from fusedseq.fused.gradient import Gradient
from fusedseq.fused.schema import Gradients, Named
from fusedseq.fused.through_oracle import call_reference

OP = "weight_drop"


def weight_drop(W: Tensor, p: float, seed: int | Tensor, variational: bool = False) -> Tensor:
    """Computes `fusedseq.reference.weight_drop` in one pass. W receives the gradient of its
    elements that were not dropped.

    Errors: ValueError for p outside [0, 1] or a W that is not (rows, columns); TypeError for a
    dtype other than fp32, fp64, bf16, and fp16 on CUDA.
    """
    check.like(OP, W, "W")
    check.dimensions(OP, "W", W, "(rows, columns)")
    check.probability(OP, "p", p)
    if p == 0:
        return W.clone()
    y: Tensor = autograd.call(OP, W, p, check.seed(OP, seed, W.device), variational)
    return y


def fake(named: Named) -> Tensor:
    return torch.empty_like(named["W"], memory_format=torch.contiguous_format)


def gradient(named: Named, grads: Gradients, needed: frozenset[str]) -> Gradients:
    """The operator is linear in W, so its gradient is the operator itself, which can be
    differentiated again.
    """
    p, seed, variational = named["p"], named["seed"], named["variational"]
    return {"W": autograd.call(OP, grads["y"], p, seed, variational)}


autograd.register(
    OP,
    fake,
    Gradient(
        results=("y",),
        oracle=lambda named: call_reference(reference.weight_drop, named),
        saves=("seed",),
        compute=gradient,
        is_linear=True,
    ),
)
