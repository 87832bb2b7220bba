"""The linear map on a GPU is the vendor's product: nothing of Triton here."""

import torch
from torch.nn import functional as F


def linear(x, W, b):
    return F.linear(x, W, b)


def linear_backward(dy, x, W, needs):
    rows, wide = dy.reshape(-1, len(W)), torch.promote_types(dy.dtype, torch.float32)

    def gradient(bit, make):
        return make() if needs & bit else x.new_empty(0)

    return (
        gradient(1, lambda: dy @ W),
        gradient(2, lambda: rows.T @ x.reshape(-1, W.size(1))),
        gradient(4, lambda: rows.sum(0, dtype=wide).to(dy.dtype)),
    )


def explain(*args, **kwargs):
    return "torch.mm: the vendor's product"
