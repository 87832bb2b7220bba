"""Selects the rows of a projection, splits its result into attention heads, and gathers the heads'
gradients in one copy.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fusedseq.fused import autograd
from fusedseq.fused.transforms import is_transformed


def heads(y: Tensor, parts: int, num_heads: int, batch_first: bool) -> tuple[Tensor, ...]:
    """Returns a projection as `parts` views (B, N, L, D): q, k and v, or some of them.

    y: (B, L, parts N D), or (L, B, parts N D) without `batch_first`

    This is `unbind` with another backward. Autograd's backward of unbind stacks the parts and then
    copies the result into the layout of y. This one copies once, or not at all if the gradients are
    already laid out as y, as `fused.attention` writes them.
    """
    has_gradient = torch.is_grad_enabled() and y.requires_grad
    # torch.jit.trace takes the sizes inside an autograd Function for constants.
    if is_transformed() or not has_gradient or torch.jit.is_tracing():
        return views(y, parts, num_heads, batch_first)
    if autograd.recorder and type(y) is Tensor:
        recorded: tuple[Tensor, ...] = autograd.recorder.heads(y, parts, num_heads, batch_first)
        return recorded
    # torch has no annotation of Function.apply
    split: tuple[Tensor, ...] = FusedseqHeads.apply(  # type: ignore[no-untyped-call]
        y, parts, num_heads, batch_first
    )
    return split


def views(y: Tensor, parts: int, num_heads: int, batch_first: bool) -> tuple[Tensor, ...]:
    """Returns the same views as `heads`, with autograd's own backward."""
    B, L = (0, 1) if batch_first else (1, 0)
    head_dim = y.size(2) // (parts * num_heads)
    return y.view(*y.shape[:2], parts, num_heads, head_dim).permute(2, B, 3, L, 4).unbind(0)


def select_rows(parameter: Tensor | None, rows: slice) -> Tensor | None:
    """Returns rows of a parameter, or None for None.

    All rows are returned as the parameter itself, because the backward of a slice would write the
    gradient a second time.
    """
    if parameter is None or rows == slice(0, len(parameter)):
        return parameter
    return parameter[rows]


class FusedseqHeads(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, y: Tensor, parts: int, num_heads: int, batch_first: bool
    ) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.shape, ctx.batch_first = y.shape, batch_first
        return views(y, parts, num_heads, batch_first)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, None, None, None]:
        present = [g for g in grads if g is not None]
        if not present:
            return None, None, None, None
        # The permutation from (B, N, L, D) to the layout of y.
        first, order = present[0], (0, 2, 1, 3) if ctx.batch_first else (2, 0, 1, 3)
        if (
            len(present) == len(grads)
            and not torch.is_grad_enabled()
            and share_layout(present, ctx.shape, order)
        ):
            dy = first.as_strided(ctx.shape, (ctx.shape[1] * ctx.shape[2], ctx.shape[2], 1))
        else:
            rows = [(torch.zeros_like(first) if g is None else g).permute(order) for g in grads]
            dy = torch.stack(rows, 2).view(ctx.shape)
        return dy, None, None, None


def share_layout(grads: Sequence[Tensor], shape: torch.Size, order: tuple[int, ...]) -> bool:
    """Returns whether gradients are views of one tensor with the layout of the projection.

    grads: (B, N, L, D) each    shape: of the projection
    order: the permutation that takes a gradient to (B, L, N, D) or (L, B, N, D)
    """
    first = grads[0]
    size = shape[2] // len(grads)  # N D: elements of one part in a row of the projection
    strides = (shape[1] * shape[2], shape[2], first.size(3), 1)  # after the permutation
    if type(first) is not Tensor:
        return False
    return all(
        tuple(g.stride(d) for d in order) == strides
        and g.untyped_storage().data_ptr() == first.untyped_storage().data_ptr()
        and g.storage_offset() == first.storage_offset() + i * size
        and g.dtype == first.dtype
        for i, g in enumerate(grads)
    )
