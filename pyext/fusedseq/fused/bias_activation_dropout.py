import torch

from fusedseq import reference
from fusedseq.fused import autograd, check

OP = "bias_activation_dropout"
ACTIVATIONS = ("relu", "gelu", "gelu_tanh", "tanh")


def bias_activation_dropout(x, b=None, activation="relu", p=0.0, seed=0):
    """As `fusedseq.reference.bias_activation_dropout`. One pass forward and one backward, which starts from x again:
    neither the activation nor the mask is kept.

    The gradient of b does not depend on the number of threads. bf16 is computed in fp32. Under autocast b is cast to
    the dtype of x, as in torch's linear.
    Errors: ValueError for another activation, shapes, devices, p outside [0, 1]; TypeError for other dtypes than fp32,
    bf16, on a CPU fp64, on CUDA fp16, or two of them.
    """
    if (y := autograd.unchecked(OP, x, b, activation, p, seed)) is not NotImplemented:
        return y
    check.tensor(OP, "x", x)
    if isinstance(b, torch.Tensor) and b.is_floating_point() and autograd.autocast_is_on(x.device.type):
        b = b.to(x.dtype)
    check.like(OP, x, "x", ("b",), check.TRITON, b=b)
    if x.dim() == 0:
        raise ValueError(f"{OP}: x must be (..., D), got {tuple(x.shape)}")
    if b is not None:
        check.shape(OP, "b", b, "(D,)", x.shape[-1:])
    if activation not in ACTIVATIONS:
        raise ValueError(f"{OP}: activation must be one of {', '.join(ACTIVATIONS)}, got {activation!r}")
    check.probability(OP, "p", p)
    return autograd.call("bias_activation_dropout", x, b, activation, p, check.seed(OP, seed, x.device))


def setup(ctx, inputs, output):
    x, b, ctx.activation, ctx.p, seed = inputs
    ctx.save_for_backward(x, b, seed)


def backward(ctx, dy):
    x, b, seed = ctx.saved_tensors
    needs = ctx.needs_input_grad
    if torch.is_grad_enabled():
        inputs = [x, b, ctx.activation, ctx.p, seed]
        return tuple(autograd.through_oracle(reference.bias_activation_dropout, inputs, needs, [dy]))
    dx, db = torch.ops.fusedseq.bias_activation_dropout_backward(
        dy, x, b, ctx.activation, ctx.p, seed, needs[0] + 2 * needs[1]
    )
    return dx if needs[0] else None, db if needs[1] else None, None, None, None


def fake_backward(dy, x, b, activation, p, seed, needs):
    dx = torch.empty_like(x, memory_format=torch.contiguous_format) if needs & 1 else x.new_empty(0)
    return dx, x.new_empty(x.size(-1) if needs & 2 else 0)


autograd.register(
    OP,
    lambda x, b, activation, p, seed: torch.empty_like(x, memory_format=torch.contiguous_format),
    backward,
    setup,
    fakes=[(f"{OP}_backward", fake_backward)],
)
