"""Fixtures of the tests of modules."""

import pytest
from fusedseq import nn

from tests.support.attention_modules import D, N

POSITIONS = {
    "none": lambda: None,
    "alibi": lambda: nn.ALiBi(N),
    "bias": lambda: nn.RelativeBias(N, 8, 16),
    "keys": lambda: nn.RelativeKeys(2, D),
    "rotary": lambda: nn.Rotary(D, max_positions=3),
}


@pytest.fixture(params=POSITIONS)
def positions(request):
    """A module of relative positions for MultiheadAttention, or None."""
    return POSITIONS[request.param]()
