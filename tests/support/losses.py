"""Inputs of the tests of the cross-entropies."""

import torch

from tests.support.placement import exact


def inputs(N=50, E=7, V=37, dtype=None):
    """Returns x (N, E), W (V, E), the targets (N,) and b (V,)."""
    dtype = dtype or exact()
    x, W, b = (
        torch.randn(*shape, dtype=dtype, requires_grad=True) for shape in ((N, E), (V, E), (V,))
    )
    return x, W, torch.randint(V, (N,)), b
