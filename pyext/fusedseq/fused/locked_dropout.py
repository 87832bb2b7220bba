from torch import Tensor

from fusedseq import reference
from fusedseq.fused import autograd, check, random_mask

OP = "locked_dropout"


def locked_dropout(x: Tensor, p: float, seed: int | Tensor) -> Tensor:
    """Computes `fusedseq.reference.locked_dropout` in one pass over x; the (B, D) mask is
    recomputed in backward.

    Errors: ValueError for p outside [0, 1] or an x that is not (T, B, D); TypeError for a dtype
    other than fp32, fp64, bf16, and fp16 on CUDA.
    """
    if p:
        found: Tensor = autograd.call_if_valid(OP, x, p, seed)
        if found is not NotImplemented:
            return found
    check.like(OP, x, "x")
    check.dimensions(OP, "x", x, "(T, B, D)")
    check.probability(OP, "p", p)
    if p == 0:
        return x.clone()
    y: Tensor = autograd.call(OP, x, p, check.seed(OP, seed, x.device))
    return y


random_mask.register(OP, reference.locked_dropout)
