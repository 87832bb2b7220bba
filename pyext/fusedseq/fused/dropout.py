from torch import Tensor

from fusedseq import reference
from fusedseq.fused import autograd, check, random_mask

OP = "dropout"


def dropout(x: Tensor, p: float, seed: int | Tensor) -> Tensor:
    """Computes `fusedseq.reference.dropout` in one pass, forward and backward; the mask is
    recomputed in backward.

    Errors: ValueError for p outside [0, 1]; TypeError for a dtype other than fp32, fp64, bf16, and
    fp16 on CUDA.
    """
    if p:
        found: Tensor = autograd.call_if_valid(OP, x, p, seed)
        if found is not NotImplemented:
            return found
    check.like(OP, x, "x")
    check.probability(OP, "p", p)
    if p == 0:
        return x.clone()
    y: Tensor = autograd.call(OP, x, p, check.seed(OP, seed, x.device))
    return y


random_mask.register(OP, reference.dropout)
