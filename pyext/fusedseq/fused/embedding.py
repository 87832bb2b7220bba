import torch

from fusedseq.fused import autograd, check


def embedding(ids, W, p=0.0, seed=0, sparse=False):
    """As `fusedseq.reference.embedding`. The dropout is in the gather: time does not depend on V, and W is never copied.

    The gradient touches only the rows used: with `sparse` it is a sparse tensor of them, otherwise the other rows are
    zeros that the system makes when somebody reads them.
    On CUDA the gradient's sums are in the order of the text, without atomics: the same bits in every run.
    Errors: IndexError for an id outside [0, V), RuntimeError instead in compiled code, and on CUDA an assertion that stops
    the device, as torch's own; ValueError for p outside [0, 1]; TypeError for ids other than int64, or a W other than fp32,
    fp64, bf16, on CUDA also fp16.
    """
    check.like("embedding", W, "W")
    check.dimensions("embedding", "W", W, "(V, E)")
    check.probability("embedding", "p", p)
    V = W.size(0)
    check.whole_numbers("embedding", "ids", ids, 0, V - 1, f"[0, V) = [0, {V})", IndexError)
    if ids.device != W.device:
        raise ValueError(f"embedding: ids must be on the device of W, {W.device}, got {ids.device}")
    seed = check.seed("embedding", seed, W.device)
    if sparse:
        return SparseGradient.apply(ids, W, p, seed)
    return autograd.call("embedding", ids, W, p, seed)


def setup(ctx, inputs, output):
    ids, W, ctx.p, seed = inputs
    ctx.V = W.size(0)
    ctx.save_for_backward(ids, seed)


def backward(ctx, dy):
    ids, seed = ctx.saved_tensors
    return None, autograd.call("embedding_backward", dy, ids, ctx.V, ctx.p, seed, None), None, None


def setup_backward(ctx, inputs, output):
    dy, ids, _, ctx.p, seed, keys = inputs
    ctx.compact = keys is not None
    ctx.save_for_backward(ids, seed)


def backward_backward(ctx, ddW):
    if ctx.compact:
        raise NotImplementedError(
            "embedding: a gradient made with sparse=True has no second derivative; use sparse=False"
        )
    # The gradient is linear in dy, and its transpose is the gather.
    ids, seed = ctx.saved_tensors
    return torch.ops.fusedseq.embedding(ids, ddW, ctx.p, seed), None, None, None, None, None


class SparseGradient(torch.autograd.Function):
    """An operator's formula has to give a dense gradient; this one gives a sparse one."""

    @staticmethod
    def forward(ctx, ids, W, p, seed):
        ctx.save_for_backward(ids, seed)
        ctx.p, ctx.V = p, W.size(0)
        return torch.ops.fusedseq.embedding(ids, W, p, seed)

    @staticmethod
    def backward(ctx, dy):
        ids, seed = ctx.saved_tensors
        used, place = ids.unique(return_inverse=True)
        rows = torch.ops.fusedseq.embedding_backward(dy, place, len(used), ctx.p, seed, used)
        return (
            None,
            torch.sparse_coo_tensor(used[None], rows, (ctx.V, dy.size(-1)), is_coalesced=True, check_invariants=False),
            None,
            None,
        )


autograd.register(
    "embedding",
    lambda ids, W, p, seed: W.new_empty((*ids.shape, W.size(1))),
    backward,
    setup,
)
autograd.register(
    "embedding_backward",
    lambda dy, ids, V, p, seed, keys: dy.new_empty((V, dy.size(-1))),
    backward_backward,
    setup_backward,
)
