"""Inputs of the tests of the cross-entropies, and a comparison with torch's."""

import torch
from torch.nn import functional as F

from tests.support.placement import exact


def inputs(N=50, E=7, V=37, dtype=None):
    """Returns x (N, E), W (V, E), the targets (N,) and b (V,)."""
    dtype = dtype or exact()
    x, W, b = (
        torch.randn(*shape, dtype=dtype, requires_grad=True) for shape in ((N, E), (V, E), (V,))
    )
    return x, W, torch.randint(V, (N,)), b


def compare_large_logits(linear_cross_entropy):
    """Compares the fp32 loss of logits near 1,000, whose differences are exact in fp32, with the
    fp64 loss of the differences.

    The loss is 0.007. The rounding of the log-sum-exp, 3e-5, would be 40 times the tolerance.
    """
    logits = torch.tensor([1000.0, 995.0, 992.5, 980.0], dtype=torch.float32)
    x, target = torch.ones(1, 1, dtype=torch.float32), torch.tensor([0])
    loss, log_prob, *_ = linear_cross_entropy(x, logits[:, None], target, return_details=True)
    expected = F.cross_entropy(logits.double()[None] - 1000, target).item()
    torch.testing.assert_close(loss.item(), expected, rtol=1e-4, atol=0)
    torch.testing.assert_close(-log_prob.item(), expected, rtol=1e-4, atol=0)
