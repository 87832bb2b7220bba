"""What the cases of fusedseq.testing do not cover of the kernel of linear_cross_entropy."""

import pytest
from fusedseq import fused

from tests.support.losses import compare_large_logits

pytestmark = [pytest.mark.triton, pytest.mark.usefixtures("on_device")]


def test_the_loss_of_large_logits_is_as_exact_as_that_of_small_ones():
    compare_large_logits(fused.linear_cross_entropy)
