"""What the cases of fusedseq.testing do not cover of the kernel of linear_cross_entropy."""

import pytest
import torch
from fusedseq import fused, reference

from tests.support.losses import compare_large_logits, inputs

pytestmark = [pytest.mark.triton, pytest.mark.usefixtures("on_device")]


@pytest.mark.parametrize("name", ["log_prob", "lse"])
def test_gradients_of_the_details_alone(name):
    """Without a gradient of the loss, the first argument of the backward kernel is None."""
    x, W, target, b = inputs(dtype=torch.float32)
    found = []
    for ops in (fused, reference):
        _, log_prob, lse, _ = ops.linear_cross_entropy(x, W, target, b, return_details=True)
        result = {"log_prob": log_prob, "lse": lse}[name]
        found.append(torch.autograd.grad(result, (x, W, b), torch.linspace(-1, 1, len(target))))
    torch.testing.assert_close(*found)


def test_the_loss_of_large_logits_is_as_exact_as_that_of_small_ones():
    compare_large_logits(fused.linear_cross_entropy)
