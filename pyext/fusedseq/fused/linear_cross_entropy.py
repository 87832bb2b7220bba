from typing import Any

import torch
from torch import Tensor

from fusedseq import reference
from fusedseq.fused import autocast, autograd, check
from fusedseq.fused.gradient import Gradient, call_backward
from fusedseq.fused.schema import Gradients, Named
from fusedseq.fused.through_oracle import call_reference

OP = "linear_cross_entropy"
REDUCTIONS = ("none", "mean", "sum")  # the operator takes the index
NEEDS = ("x", "W", "b")  # the inputs of the bits of the operator's own argument `needs`


def linear_cross_entropy(
    x: Tensor,
    W: Tensor,
    target: Tensor,
    b: Tensor | None = None,
    *,
    class_weights: Tensor | None = None,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    temperature: float = 1.0,
    reduction: str = "mean",
    return_details: bool = False,
) -> Tensor | tuple[Tensor, Tensor, Tensor, Tensor]:
    """Computes `fusedseq.reference.linear_cross_entropy` without keeping the (N, V) logits.

    They are computed in chunks, which are discarded in forward. On a CPU, rows whose target is
    ignore_index cost nothing.

    With gradients, a CPU keeps the logits of a chunk of rows: V numbers for each row, of 4 bytes (8
    in fp64, 6 where bfloat16 numbers are multiplied). A chunk has as many rows as fit in 160 MiB,
    but at least 144 and at most 864. So the memory grows with V where V exceeds 290,000 in fp32,
    and is then 576 V bytes. In backward, and where bfloat16 numbers are multiplied with AMX and E
    is at most 512, no logits of more than 64 rows are kept, only the gradients of those of a range
    of classes, at most 32 MiB. On CUDA a block of logits takes 128 MiB, or 1,024 logits for each
    row where these are more; x and W whose rows are not a multiple of 16 bytes are copied to rows
    that are, as the fast kernels of cuBLAS need them.

    The gradients are computed together with the loss, and multiplied by the loss's gradient in
    backward, which may be called again. With reduction "none", or where log_prob or lse has a
    gradient, backward computes the logits a second time. If no input requires a gradient, no work
    is done for gradients. Autocast casts x, W and b to its dtype; of bf16 tensors logits and sums
    are fp32; docs/precision.md says where bfloat16 numbers are multiplied.

    The loss of a row whose logits are all -inf is infinite, where that of the oracle and of torch
    is NaN.

    Errors: IndexError for a target that is neither in [0, V) nor ignore_index (RuntimeError in
    compiled code, a device-side assertion on a GPU); ValueError or TypeError naming the argument,
    for a wrong shape or device, a dtype other than fp32, bf16, fp64 (CPU) and fp16 (CUDA), or an
    option out of range.
    """
    check.tensor(OP, "x", x)
    x, W, b = autocast.cast(x.device.type, x, W, b)
    target = check.int64(target)
    check_tensors(x, W, target, b, class_weights, ignore_index)
    check_options(label_smoothing, z_loss, temperature, reduction)
    needs = 0
    if torch.is_grad_enabled() and reduction != "none":
        needs = needs_bits(t is not None and t.requires_grad for t in (x, W, b))
    named: Named = {
        "x": x.reshape(-1, W.size(1)),
        "W": W,
        "target": target.reshape(-1),
        "b": b,
        "class_weights": class_weights,
        "ignore_index": ignore_index,
        "label_smoothing": label_smoothing,
        "z_loss": z_loss,
        "temperature": temperature,
        "reduction": REDUCTIONS.index(reduction),
        "needs": needs,
    }
    found: tuple[Tensor, ...] = autograd.call_by_name(OP, named)
    loss, log_prob, lse, argmax = found[:4]
    loss = loss.reshape(target.shape) if reduction == "none" else loss
    if not return_details:
        return loss
    log_prob, lse, argmax = (t.reshape(target.shape) for t in (log_prob, lse, argmax))
    return loss, log_prob, lse, argmax


def check_tensors(
    x: Any, W: Any, target: Any, b: Any, class_weights: Any, ignore_index: int, op: str = OP
) -> None:
    check.like(op, x, "x", ("b",), check.TRITON, W=W, b=b)
    check.dimensions(op, "W", W, "(V, E)")
    V, E = W.shape
    if V == 0 or E == 0:
        raise ValueError(f"{op}: W must be (V, E), both at least 1, got {tuple(W.shape)}")
    if x.dim() == 0 or x.size(-1) != E:
        raise ValueError(f"{op}: x must be (..., E) with W's E = {E}, got {tuple(x.shape)}")
    check.tensor(op, "target", target)
    check.shape(op, "target", target, "(...,) of x", x.shape[:-1])
    check.whole_number(op, "ignore_index", ignore_index)
    check.classes(op, "target", target, V, ignore_index)
    if b is not None:
        check.shape(op, "b", b, "(V,)", (V,))
    if class_weights is not None:
        check.tensor(op, "class_weights", class_weights)
        check.shape(op, "class_weights", class_weights, "(V,)", (V,))
        if class_weights.dtype not in (x.dtype, torch.float32):
            raise TypeError(
                f"{op}: class_weights must be of the dtype of x, {x.dtype}, or torch.float32, got "
                f"{class_weights.dtype}"
            )
    for name, t in (("target", target), ("class_weights", class_weights)):
        if t is not None and t.device != x.device:
            raise ValueError(f"{op}: {name} must be on the device of x, {x.device}, got {t.device}")


def check_options(
    label_smoothing: float, z_loss: float, temperature: float, reduction: str
) -> None:
    check.probability(OP, "label_smoothing", label_smoothing)
    check.at_least_zero(OP, "z_loss", z_loss)
    check.number(OP, "temperature", temperature)
    if not temperature > 0:
        raise ValueError(f"{OP}: temperature must be above 0, got {temperature}")
    if reduction not in REDUCTIONS:
        raise ValueError(f"{OP}: reduction must be one of {', '.join(REDUCTIONS)}, got {reduction}")


def needs_bits(needed: Any) -> int:
    """The integer whose bit i is set where the i-th of `NEEDS` requires a gradient."""
    return sum(1 << i for i, need in enumerate(needed) if need)


def computing_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype of the loss."""
    return torch.promote_types(dtype, torch.float32)


def gradient(named: Named, grads: Gradients, needed: frozenset[str]) -> Gradients:
    """Multiplies the gradients that were computed with the loss, where these suffice; else computes
    them anew.
    """
    computed = {name for i, name in enumerate(NEEDS) if named["needs"] >> i & 1}
    suffices = grads["log_prob"] is None and grads["lse"] is None and needed <= computed
    op = "linear_cross_entropy_scale" if suffices else "linear_cross_entropy_backward"
    found = call_backward(op, named, grads, needed)
    return {name: None if g is None else g.to(named["x"].dtype) for name, g in found.items()}


def oracle(named: Named) -> Any:
    options = {"reduction": REDUCTIONS[named["reduction"]], "return_details": True}
    return call_reference(reference.linear_cross_entropy, named | options)


def fake(named: Named) -> tuple[Tensor, ...]:
    x, reduction = named["x"], REDUCTIONS[named["reduction"]]
    rows = x.new_empty(x.size(0), dtype=computing_dtype(x.dtype))
    loss = rows if reduction == "none" else rows.new_empty(())
    argmax = named["target"].new_empty(x.size(0))
    return loss, torch.empty_like(rows), torch.empty_like(rows), argmax, *fake_gradients(named)


def fake_gradients(named: Named) -> tuple[Tensor, ...]:
    # Gradients in fp16 could underflow before they are multiplied by a loss scale.
    x, W, needs = named["x"], named["W"], named["needs"]
    dtype = torch.bfloat16 if x.dtype == torch.bfloat16 else computing_dtype(x.dtype)
    like = x.new_empty(0, dtype=dtype)
    shapes = (x.shape, W.shape, W.shape[:1])
    return tuple(
        like.new_empty(shape if needs >> i & 1 else (0,)) for i, shape in enumerate(shapes)
    )


def fake_scale(named: Named) -> tuple[Tensor, ...]:
    gradients = (named[name] for name in ("dx", "dW", "db"))
    return tuple(
        named["x"].new_empty(g.shape if named["needs"] >> i & 1 else (0,))
        for i, g in enumerate(gradients)
    )


autograd.register(
    OP,
    fake,
    Gradient(
        results=("loss", "log_prob", "lse"),
        backwards=("linear_cross_entropy_backward", "linear_cross_entropy_scale"),
        oracle=oracle,
        compute=gradient,
    ),
)
autograd.register_fake("linear_cross_entropy_backward", fake_gradients)
autograd.register_fake("linear_cross_entropy_scale", fake_scale)
