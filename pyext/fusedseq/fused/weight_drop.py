import torch

from fusedseq.fused import autograd, check


def weight_drop(W, p, seed, variational=False):
    """As `fusedseq.reference.weight_drop`. One pass; W receives the gradient of what was kept, and is never written.

    Errors: ValueError for p outside [0, 1] or a W that is not (rows, columns); TypeError for a dtype other than fp32,
    fp64, bf16, on CUDA also fp16.
    """
    check.like("weight_drop", W, "W")
    check.dimensions("weight_drop", "W", W, "(rows, columns)")
    check.probability("weight_drop", "p", p)
    if p == 0:
        return W.clone()
    return autograd.call("weight_drop", W, p, check.seed("weight_drop", seed, W.device), variational)


def setup(ctx, inputs, output):
    _, ctx.p, seed, ctx.variational = inputs
    ctx.save_for_backward(seed)


def backward(ctx, dy):
    # Linear in W: the gradient is the operator itself, which has a gradient again.
    return torch.ops.fusedseq.weight_drop(dy, ctx.p, *ctx.saved_tensors, ctx.variational), None, None, None


autograd.register(
    "weight_drop",
    lambda W, p, seed, variational: torch.empty_like(W, memory_format=torch.contiguous_format),
    backward,
    setup,
)
