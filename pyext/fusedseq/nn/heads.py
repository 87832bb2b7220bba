"""The heads of a projection, and the way of their gradients back into it."""

import torch

from fusedseq.fused import autograd


def heads(y, parts, num_heads, batch_first):
    """(B, L, parts N D), or (L, B, parts N D) without `batch_first` -> `parts` views (B, N, L, D) of it.

    `unbind` with another gradient: autograd's stacks the parts and copies them once more into the order of y. This one copies
    them once, or not at all where the operator has laid them out as y, as `fused.attention` does.
    """
    if autograd.is_transformed() or not (torch.is_grad_enabled() and y.requires_grad):
        return views(y, parts, num_heads, batch_first)
    if autograd.recorder and type(y) is torch.Tensor:
        return autograd.recorder.heads(y, parts, num_heads, batch_first)
    return _Heads.apply(y, parts, num_heads, batch_first)


def views(y, parts, num_heads, batch_first):
    B, L = (0, 1) if batch_first else (1, 0)
    return y.view(*y.shape[:2], parts, num_heads, -1).permute(2, B, 3, L, 4).unbind(0)


class _Heads(torch.autograd.Function):
    @staticmethod
    def forward(ctx, y, parts, num_heads, batch_first):
        ctx.set_materialize_grads(False)
        ctx.shape, ctx.batch_first = y.shape, batch_first
        return views(y, parts, num_heads, batch_first)

    @staticmethod
    def backward(ctx, *grads):
        known = [g for g in grads if g is not None]
        if not known:
            return None, None, None, None
        first, order = known[0], (0, 2, 1, 3) if ctx.batch_first else (2, 0, 1, 3)
        if len(known) == len(grads) and not torch.is_grad_enabled() and lie_together(grads, ctx.shape, order):
            dy = first.as_strided(ctx.shape, (ctx.shape[1] * ctx.shape[2], ctx.shape[2], 1))
        else:
            rows = [(torch.zeros_like(first) if g is None else g).permute(order) for g in grads]
            dy = torch.stack(rows, 2).view(ctx.shape)
        return dy, None, None, None


def lie_together(grads, shape, order):
    """Whether the gradients (B, N, L, D) are parts of one tensor, each where its part of y (`shape`) is."""
    first = grads[0]
    size = shape[2] // len(grads)  # elements of a part's row
    strides = (shape[1] * shape[2], shape[2], first.size(3), 1)  # of (B, L, N, D) or (L, B, N, D)
    if type(first) is not torch.Tensor:
        return False
    return all(
        tuple(g.stride(d) for d in order) == strides
        and g.untyped_storage().data_ptr() == first.untyped_storage().data_ptr()
        and g.storage_offset() == first.storage_offset() + i * size
        and g.dtype == first.dtype
        for i, g in enumerate(grads)
    )
