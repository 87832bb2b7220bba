import torch
from torch import Tensor

from fusedseq import reference
from fusedseq.fused import autocast, autograd, check
from fusedseq.fused.gradient import Gradient
from fusedseq.fused.schema import Named
from fusedseq.fused.through_oracle import call_reference

OP = "bias_activation_dropout"
ACTIVATIONS = ("relu", "gelu", "gelu_tanh", "tanh")


def bias_activation_dropout(
    x: Tensor,
    b: Tensor | None = None,
    activation: str = "relu",
    p: float = 0.0,
    seed: int | Tensor = 0,
) -> Tensor:
    """Computes `fusedseq.reference.bias_activation_dropout` with one pass over memory forward and
    one backward.

    Backward starts from x again: neither the activation nor the mask is saved. The gradient of b
    does not depend on the number of threads. bf16 is computed in fp32. Under autocast b is cast to
    the dtype of x, as in torch's linear.

    Errors: ValueError for an unknown activation, a wrong shape or device, or p outside [0, 1];
    TypeError for tensors of two dtypes, or of a dtype other than fp32, bf16, fp64 (CPU) and fp16
    (CUDA).
    """
    y: Tensor = autograd.call_if_valid(OP, x, b, activation, p, seed)
    if y is not NotImplemented:
        return y
    check.tensor(OP, "x", x)
    if isinstance(b, Tensor) and b.is_floating_point() and autocast.is_on(x.device.type):
        b = b.to(x.dtype)
    check.like(OP, x, "x", ("b",), check.TRITON, b=b)
    if x.dim() == 0:
        raise ValueError(f"{OP}: x must be (..., D), got {tuple(x.shape)}")
    if b is not None:
        check.shape(OP, "b", b, "(D,)", x.shape[-1:])
    if activation not in ACTIVATIONS:
        raise ValueError(
            f"{OP}: activation must be one of {', '.join(ACTIVATIONS)}, got {activation!r}"
        )
    check.probability(OP, "p", p)
    y = autograd.call(OP, x, b, activation, p, check.seed(OP, seed, x.device))
    return y


def fake(named: Named) -> Tensor:
    x: Tensor = named["x"]
    return torch.empty_like(x, memory_format=torch.contiguous_format)


autograd.register(
    OP,
    fake,
    Gradient(
        results=("y",),
        backwards=("bias_activation_dropout_backward",),
        oracle=lambda named: call_reference(reference.bias_activation_dropout, named),
    ),
)


def new_gradient(named: Named, name: str) -> Tensor:
    x: Tensor = named["x"]
    return x.new_empty(x.shape if name == "x" else x.shape[-1:])


autograd.register_fake_backward(OP, new_gradient)
