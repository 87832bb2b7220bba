import torch

from fusedseq import reference
from fusedseq.fused import autograd, check

DTYPES = {"cpu": (*check.DTYPES["cpu"], torch.float16)}


def linear(x, W, b=None):
    """As `fusedseq.reference.linear`: the output layer, on the product that the recurrences use.

    On a CPU where torch's library has no fast path for the processor (MKL on AMD) it is the faster one. Under autocast
    the operands are cast to its dtype; bf16 and fp16 are accumulated in fp32.
    Errors: ValueError or TypeError naming the argument, for shapes, devices, dtypes other than fp32, fp64, bf16, fp16.
    """
    if (y := autograd.unchecked("linear", x, W, b)) is not NotImplemented:
        return y
    check.tensor("linear", "x", x)
    x, W, b = autograd.autocast(x.device.type, x, W, b)
    check.like("linear", x, "x", ("b",), dtypes=DTYPES, W=W, b=b)
    check.dimensions("linear", "W", W, "(N, K)")
    if x.dim() == 0 or x.size(-1) != W.size(1) or W.size(1) == 0:
        raise ValueError(f"linear: x must be (..., K) with W's K = {W.size(1)}, at least 1, got {tuple(x.shape)}")
    if b is not None:
        check.shape("linear", "b", b, "(N,)", (W.size(0),))
    return autograd.call("linear", x, W, b)


def setup(ctx, inputs, output):
    ctx.save_for_backward(*inputs)


def backward(ctx, dy):
    inputs, needs = ctx.saved_tensors, ctx.needs_input_grad
    if torch.is_grad_enabled():
        return tuple(autograd.through_oracle(reference.linear, list(inputs), needs, [dy]))
    bits = sum(1 << i for i, need in enumerate(needs) if need)
    found = torch.ops.fusedseq.linear_backward(dy, *inputs[:2], bits)
    return tuple(g if need else None for g, need in zip(found, needs, strict=True))


def fake_backward(dy, x, W, needs):
    return (
        x.new_empty(x.shape if needs & 1 else (0,)),
        x.new_empty(W.shape if needs & 2 else (0,)),
        x.new_empty(W.shape[:1] if needs & 4 else (0,)),
    )


autograd.register(
    "linear",
    lambda x, W, b: x.new_empty(*x.shape[:-1], W.size(0)),
    backward,
    setup,
    fakes=[("linear_backward", fake_backward)],
)
