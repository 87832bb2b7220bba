"""Tests an operator against its oracle. Run this file, or give it to pytest.

The oracle in fp64 is the truth. The error allowed is derived, not chosen: twice the error that the
oracle itself makes in the operator's dtype, plus a few roundings. Random masks do not depend on the
dtype or the device, so dropout stays on.
"""

import pytest
import torch
from fusedseq import fused, reference
from fusedseq.testing import check


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("p", [0.0, 0.3, 1.0])
def test_locked_dropout_agrees_with_the_oracle(p, dtype):
    x = torch.randn(7, 3, 11, dtype=dtype)  # odd sizes find more mistakes than round ones
    # `check` runs fused.locked_dropout and the oracle, forward and backward, and compares results
    # and gradients. It returns the largest error as a fraction of what is allowed.
    assert check("locked_dropout", (x, p, 42), {}) <= 1


def test_all_steps_share_one_mask():
    """A property: a test says what must hold, and does not repeat numbers."""
    y = fused.locked_dropout(torch.ones(7, 3, 11), 0.5, seed=42)
    assert (y == y[0]).all()
    assert {*y.unique().tolist()} == {0.0, 2.0}  # dropped, or scaled by 1 / (1 - p)


def test_the_mask_is_that_of_the_oracle():
    x = torch.randn(7, 3, 11)
    dropped = fused.locked_dropout(x, 0.5, seed=42) == 0
    assert torch.equal(dropped, reference.locked_dropout(x, 0.5, seed=42) == 0)


def test_a_wrong_probability_is_an_error():
    with pytest.raises(ValueError, match=r"locked_dropout: p must be in \[0, 1\], got 2"):
        fused.locked_dropout(torch.randn(7, 3, 11), 2.0, seed=42)


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__, "-q", "-p", "no:cacheprovider"]))
