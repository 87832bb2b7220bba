import torch
from torch import Tensor

from fusedseq import reference
from fusedseq.fused import autocast, autograd, check, int8_weight
from fusedseq.fused.gradient import Gradient
from fusedseq.fused.schema import Named
from fusedseq.fused.through_oracle import call_reference

OP = "linear"
DTYPES = {"cpu": (*check.DTYPES["cpu"], torch.float16)}


def linear(x: Tensor, W: Tensor, b: Tensor | None = None) -> Tensor:
    """Computes `fusedseq.reference.linear` with this package's own matrix product, which `lstm` and
    the other recurrences use as well.

    On CPUs where torch's own library has no fast path for the processor (MKL on AMD) it is faster
    than torch's. On CUDA the product is torch's. Autocast casts the operands to its dtype; bf16 and
    fp16 are accumulated in fp32. docs/precision.md says where bfloat16 numbers are multiplied.

    A W in 8 bits (`fusedseq.quantize_`, or torchao's Int8WeightOnlyConfig) is multiplied as it is
    on the CPU; where x or b has a gradient, in fp64 and on CUDA it is converted first. W itself
    has no gradient.

    Any size may be 0. With K = 0 there is nothing to multiply, and the result is that of
    `fusedseq.reference.linear`, b in every row.

    Errors: ValueError or TypeError naming the argument, for a wrong shape, device or dtype (fp32,
    fp64, bf16 and fp16 are supported).
    """
    y: Tensor = int8_weight.call_if_valid(OP, x, W, b)
    if y is not NotImplemented:
        return y
    check.tensor(OP, "x", x)
    x, W, b = autocast.cast(x.device.type, x, W, b)
    check.like(OP, x, "x", ("b",), dtypes=DTYPES, W=W, b=b)
    check.dimensions(OP, "W", W, "(N, K)")
    if x.dim() == 0 or x.size(-1) != W.size(1):
        raise ValueError(f"{OP}: x must be (..., K) with W's K = {W.size(1)}, got {tuple(x.shape)}")
    if b is not None:
        check.shape(OP, "b", b, "(N,)", (W.size(0),))
    quantized = int8_weight.parts(W)
    if quantized is not None:
        if W.size(1) and int8_weight.has_product(x, b):
            numbers, scale = quantized
            y = torch.ops.fusedseq.linear_int8(x, numbers, scale, b)
            return y
        W = W.dequantize()
    y = autograd.call(OP, x, W, b) if W.size(1) else reference.linear(x, W, b)
    return y


def fake(named: Named) -> Tensor:
    x: Tensor = named["x"]
    return x.new_empty(*x.shape[:-1], named["W"].size(0))


def new_gradient(named: Named, name: str) -> Tensor:
    # The backward does not take b, whose gradient has the shape of a column of W.
    x: Tensor = named["x"]
    return x.new_empty(named["W"].shape[:1] if name == "b" else named[name].shape)


autograd.register(
    OP,
    fake,
    Gradient(
        results=("y",),
        backwards=("linear_backward",),
        oracle=lambda named: call_reference(reference.linear, named),
    ),
)
autograd.register_fake_backward(OP, new_gradient)
