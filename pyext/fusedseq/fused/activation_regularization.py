import torch

from fusedseq import reference
from fusedseq.fused import autograd, check


def activation_regularization(dropped, raw, alpha, beta):
    """As `fusedseq.reference.activation_regularization`. One pass over both outputs, and one back; sums in fp64, in an
    order that does not depend on the number of threads.

    Errors: ValueError where dropped and raw are not (T, B, H) both, T at least 1; TypeError for other dtypes than fp32,
    fp64, bf16, on CUDA also fp16, or two of them.
    """
    op = "activation_regularization"
    check.like(op, dropped, "dropped", raw=raw)
    check.dimensions(op, "dropped", dropped, "(T, B, H)")
    check.shape(op, "raw", raw, "(T, B, H)", dropped.shape)
    if len(raw) == 0:
        raise ValueError(f"{op}: T must be at least 1, got {tuple(raw.shape)}")
    return autograd.call("activation_regularization", dropped, raw, alpha, beta)


def setup(ctx, inputs, output):
    dropped, raw, ctx.alpha, ctx.beta = inputs
    ctx.save_for_backward(dropped, raw)


def backward(ctx, dloss):
    if torch.is_grad_enabled():
        found = autograd.through_oracle(
            reference.activation_regularization,
            [*ctx.saved_tensors, ctx.alpha, ctx.beta],
            [*ctx.needs_input_grad[:2], False, False],
            [dloss],
        )
        return *found[:2], None, None
    ddropped, draw = torch.ops.fusedseq.activation_regularization_backward(
        dloss, *ctx.saved_tensors, ctx.alpha, ctx.beta
    )
    return ddropped, draw, None, None


def fake_backward(dloss, dropped, raw, alpha, beta):
    return dropped.new_empty(dropped.shape), raw.new_empty(raw.shape)


autograd.register(
    "activation_regularization",
    lambda dropped, raw, alpha, beta: dropped.new_empty(()),
    backward,
    setup,
    fakes=[("activation_regularization_backward", fake_backward)],
)
