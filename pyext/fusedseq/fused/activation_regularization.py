from torch import Tensor

from fusedseq import reference
from fusedseq.fused import autograd, check
from fusedseq.fused.gradient import Gradient
from fusedseq.fused.schema import Named
from fusedseq.fused.through_oracle import call_reference

OP = "activation_regularization"


def activation_regularization(dropped: Tensor, raw: Tensor, alpha: float, beta: float) -> Tensor:
    """Computes `fusedseq.reference.activation_regularization` with one pass over both tensors
    forward and one backward.

    The sums are in fp64, in an order that does not depend on the number of threads.

    Errors: ValueError where dropped and raw are not both (T, B, H) with T at least 1; TypeError for
    tensors of two dtypes, or of a dtype other than fp32, fp64, bf16, and fp16 on CUDA.
    """
    check.like(OP, dropped, "dropped", raw=raw)
    check.dimensions(OP, "dropped", dropped, "(T, B, H)")
    check.shape(OP, "raw", raw, "(T, B, H)", dropped.shape)
    if len(raw) == 0:
        raise ValueError(f"{OP}: T must be at least 1, got {tuple(raw.shape)}")
    check.number(OP, "alpha", alpha)
    check.number(OP, "beta", beta)
    loss: Tensor = autograd.call(OP, dropped, raw, alpha, beta)
    return loss


def fake(named: Named) -> Tensor:
    dropped: Tensor = named["dropped"]
    return dropped.new_empty(())


autograd.register(
    OP,
    fake,
    Gradient(
        results=("loss",),
        backwards=("activation_regularization_backward",),
        oracle=lambda named: call_reference(reference.activation_regularization, named),
    ),
)
autograd.register_fake_backward(OP)
