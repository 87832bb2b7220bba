from torch import Tensor

from fusedseq import reference
from fusedseq.fused import autograd, check, random_mask

OP = "weight_drop"


def weight_drop(W: Tensor, p: float, seed: int | Tensor, variational: bool = False) -> Tensor:
    """Computes `fusedseq.reference.weight_drop` in one pass. W receives the gradient of its
    elements that were not dropped.

    Errors: ValueError for p outside [0, 1] or a W that is not (rows, columns); TypeError for a
    dtype other than fp32, fp64, bf16, and fp16 on CUDA.
    """
    if p:
        found: Tensor = autograd.call_if_valid(OP, W, p, seed, variational)
        if found is not NotImplemented:
            return found
    check.like(OP, W, "W")
    check.dimensions(OP, "W", W, "(rows, columns)")
    check.probability(OP, "p", p)
    check.flag(OP, "variational", variational)
    if p == 0:
        return W.clone()
    y: Tensor = autograd.call(OP, W, p, check.seed(OP, seed, W.device), variational)
    return y


random_mask.register(OP, reference.weight_drop)
