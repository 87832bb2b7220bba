import torch

from fusedseq.fused import autograd, check


def dropout(x, p, seed):
    """As `fusedseq.reference.dropout`. One pass; the mask is made on the way, in forward and again in backward.

    Errors: ValueError for p outside [0, 1]; TypeError for a dtype other than fp32, fp64, bf16, on CUDA also fp16.
    """
    check.like("dropout", x, "x")
    check.probability("dropout", "p", p)
    if p == 0:
        return x.clone()
    return autograd.call("dropout", x, p, check.seed("dropout", seed, x.device))


def setup(ctx, inputs, output):
    _, ctx.p, seed = inputs
    ctx.save_for_backward(seed)


def backward(ctx, dy):
    # Linear in x: the gradient is the operator itself, which has a gradient again.
    return torch.ops.fusedseq.dropout(dy, ctx.p, *ctx.saved_tensors), None, None


autograd.register(
    "dropout", lambda x, p, seed: torch.empty_like(x, memory_format=torch.contiguous_format), backward, setup
)
