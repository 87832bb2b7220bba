"""The linear map on a GPU: the matrix products of cuBLAS, called through torch. There is no Triton
kernel."""

import torch
from torch.nn import functional as F


def linear(x, W, b):
    """Returns x W^T + b.    x: (..., X)    W: (Y, X)    b: (Y,) or None"""
    rows = F.linear(x.reshape(-1, W.size(1)), W, b)
    # Not a view of the rows, which autograd would not let a program change in place.
    return torch.ops.aten._unsafe_view(rows, (*x.shape[:-1], len(W)))


def linear_backward(dy, x, W, needs):
    """Returns dx, dW, db, for the bits 1, 2 and 4 of `needs`; empty tensors in place of the others.

    dy: (..., Y)
    """
    dy_rows = dy.reshape(-1, len(W))
    wide = torch.promote_types(dy.dtype, torch.float32)

    def gradient(bit, compute):
        return compute() if needs & bit else x.new_empty(0)

    return (
        gradient(1, lambda: dy @ W),
        gradient(2, lambda: dy_rows.T @ x.reshape(-1, W.size(1))),
        gradient(4, lambda: dy_rows.sum(0, dtype=wide).to(dy.dtype)),
    )


def explain(*args, **kwargs):
    """Returns which kernel a call runs, and why."""
    return "torch.mm: the vendor's product"
