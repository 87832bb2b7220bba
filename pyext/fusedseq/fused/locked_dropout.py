import torch

from fusedseq.fused import autograd, check


def locked_dropout(x, p, seed):
    """As `fusedseq.reference.locked_dropout`. One pass over x; the (B, D) mask is made once, and again in backward.

    Errors: ValueError for p outside [0, 1] or an x that is not (T, B, D); TypeError for a dtype other than fp32, fp64,
    bf16, on CUDA also fp16.
    """
    check.like("locked_dropout", x, "x")
    check.dimensions("locked_dropout", "x", x, "(T, B, D)")
    check.probability("locked_dropout", "p", p)
    if p == 0:
        return x.clone()
    return autograd.call("locked_dropout", x, p, check.seed("locked_dropout", seed, x.device))


def setup(ctx, inputs, output):
    _, ctx.p, seed = inputs
    ctx.save_for_backward(seed)


def backward(ctx, dy):
    # Linear in x: the gradient is the operator itself, which has a gradient again.
    return torch.ops.fusedseq.locked_dropout(dy, ctx.p, *ctx.saved_tensors), None, None


autograd.register(
    "locked_dropout", lambda x, p, seed: torch.empty_like(x, memory_format=torch.contiguous_format), backward, setup
)
