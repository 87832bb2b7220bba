import torch

from fusedseq import reference
from fusedseq.fused import autograd, check

OP = "linear_cross_entropy"
REDUCTIONS = ("none", "mean", "sum")  # by the numbers that the operator takes


def linear_cross_entropy(
    x, W, target, b=None, *, class_weights=None, ignore_index=-100, label_smoothing=0.0, z_loss=0.0, temperature=1.0,
    reduction="mean", return_details=False,
):  # fmt: skip
    """As `fusedseq.reference.linear_cross_entropy`, and the logits are never in memory: blocks of them are made, used
    and forgotten. On a CPU rows without a target cost nothing.

    Gradients are formed with the loss and scaled in backward, which may be called again; a reduction of "none", or a
    gradient of log_prob or lse, makes the logits a second time in backward. Without gradients there is no work for them.
    Under autocast x, W and b are cast to its dtype; bf16 is computed in fp32, and so are the sums of W's gradient.
    Errors: IndexError for a target that is neither in [0, V) nor ignore_index, RuntimeError instead in compiled code,
    a device-side assertion on a GPU; ValueError or TypeError naming the argument, for shapes, devices, dtypes other
    than fp32, bf16, on a CPU fp64, on CUDA fp16, and options out of range.
    """
    check.tensor(OP, "x", x)
    x, W, b = autograd.autocast(x.device.type, x, W, b)
    check_tensors(x, W, target, b, class_weights, ignore_index)
    check_options(label_smoothing, z_loss, temperature, reduction)
    needs = 0
    if torch.is_grad_enabled() and reduction != "none":
        needs = wanted(t is not None and t.requires_grad for t in (x, W, b))
    loss, log_prob, lse, argmax, *_ = autograd.call(
        "linear_cross_entropy",
        x.reshape(-1, W.size(1)), W, target.reshape(-1), b, class_weights, ignore_index, label_smoothing, z_loss,
        temperature, REDUCTIONS.index(reduction), needs,
    )  # fmt: skip
    loss = loss.reshape(target.shape) if reduction == "none" else loss
    return (loss, *(t.reshape(target.shape) for t in (log_prob, lse, argmax))) if return_details else loss


def check_tensors(x, W, target, b, class_weights, ignore_index, op=OP):
    check.like(op, x, "x", ("b",), check.TRITON, W=W, b=b)
    check.dimensions(op, "W", W, "(V, E)")
    V, E = W.shape
    if V == 0 or E == 0:
        raise ValueError(f"{op}: W must be (V, E), both at least 1, got {tuple(W.shape)}")
    if x.dim() == 0 or x.size(-1) != E:
        raise ValueError(f"{op}: x must be (..., E) with W's E = {E}, got {tuple(x.shape)}")
    check.tensor(op, "target", target)
    check.shape(op, "target", target, "(...,) of x", x.shape[:-1])
    check.classes(op, "target", target, V, ignore_index)
    if b is not None:
        check.shape(op, "b", b, "(V,)", (V,))
    if class_weights is not None:
        check.tensor(op, "class_weights", class_weights)
        check.shape(op, "class_weights", class_weights, "(V,)", (V,))
        if class_weights.dtype not in (x.dtype, torch.float32):
            raise TypeError(f"{op}: class_weights must be of the dtype of x, {x.dtype}, or torch.float32, got "
                            f"{class_weights.dtype}")  # fmt: skip
    for name, t in (("target", target), ("class_weights", class_weights)):
        if t is not None and t.device != x.device:
            raise ValueError(f"{op}: {name} must be on the device of x, {x.device}, got {t.device}")


def check_options(label_smoothing, z_loss, temperature, reduction):
    check.probability(OP, "label_smoothing", label_smoothing)
    if not z_loss >= 0:
        raise ValueError(f"{OP}: z_loss must be at least 0, got {z_loss}")
    if not temperature > 0:
        raise ValueError(f"{OP}: temperature must be above 0, got {temperature}")
    if reduction not in REDUCTIONS:
        raise ValueError(f"{OP}: reduction must be one of {', '.join(REDUCTIONS)}, got {reduction}")


def wanted(needs):
    """The bits of the gradients that the operators are to form: x 1, W 2, b 4."""
    return sum(1 << i for i, need in enumerate(needs) if need)


def wide(dtype):
    """Of the loss and of gradients before they are scaled."""
    return torch.promote_types(dtype, torch.float32)


def fake(x, W, target, b, class_weights, ignore_index, label_smoothing, z_loss, temperature, reduction, needs):
    rows = x.new_empty(x.size(0), dtype=wide(x.dtype))
    loss = rows if REDUCTIONS[reduction] == "none" else rows.new_empty(())
    gradients = (t.to(rows.dtype) for t in fake_gradients(x, W, needs))
    return (loss, torch.empty_like(rows), torch.empty_like(rows), target.new_empty(x.size(0)), *gradients)


def fake_gradients(x, W, needs):
    return (
        x.new_empty(x.shape if needs & 1 else (0,)),
        x.new_empty(W.shape if needs & 2 else (0,)),
        x.new_empty(W.shape[:1] if needs & 4 else (0,)),
    )


def fake_backward(dloss, dlog_prob, dlse, lse, x, W, *rest):
    return tuple(t.to(lse.dtype) for t in fake_gradients(x, W, rest[-1]))


def fake_scale(dx, dW, db, dloss, needs):
    return tuple(g.new_empty(g.shape if needs >> i & 1 else (0,)) for i, g in enumerate((dx, dW, db)))


def setup(ctx, inputs, output):
    tensors, ctx.options, ctx.formed = inputs[:5], inputs[5:-1], inputs[-1]
    _, _, lse, argmax, *gradients = output
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(argmax, *gradients)
    ctx.save_for_backward(*tensors, lse, *gradients)


def oracle(x, W, target, b, class_weights, ignore_index, label_smoothing, z_loss, temperature, reduction):
    return reference.linear_cross_entropy(
        x, W, target, b, class_weights=class_weights, ignore_index=ignore_index, label_smoothing=label_smoothing,
        z_loss=z_loss, temperature=temperature, reduction=REDUCTIONS[reduction], return_details=True,
    )[:3]  # fmt: skip


def backward(ctx, dloss, dlog_prob, dlse, *_):
    (*tensors, lse), formed = ctx.saved_tensors[:6], ctx.saved_tensors[6:]
    x, W, _, b, _ = tensors
    needs = ctx.needs_input_grad
    if dloss is None and dlog_prob is None and dlse is None:
        return (None,) * len(needs)
    if torch.is_grad_enabled():
        inputs = [*tensors, *ctx.options]
        differentiated = [needs[0], needs[1], False, needs[3], *[False] * (len(inputs) - 4)]
        return (*autograd.through_oracle(oracle, inputs, differentiated, [dloss, dlog_prob, dlse]), None)
    places = (0, 1, 3)
    bits = wanted(needs[i] for i in places)
    if dlog_prob is None and dlse is None and bits & ctx.formed == bits:
        found = torch.ops.fusedseq.linear_cross_entropy_scale(*formed, dloss, bits)
    else:
        found = torch.ops.fusedseq.linear_cross_entropy_backward(
            dloss, dlog_prob, dlse, lse, *tensors, *ctx.options, bits
        )
    dx, dW, db = (g.to(x.dtype) if needs[i] else None for i, g in zip(places, found, strict=True))
    return dx, dW, None, db, *[None] * (len(needs) - 4)


autograd.register(
    OP,
    fake,
    backward,
    setup,
    fakes=[
        ("linear_cross_entropy_backward", fake_backward),
        ("linear_cross_entropy_scale", fake_scale),
    ],
)
