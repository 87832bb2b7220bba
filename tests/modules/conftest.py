"""Fixtures of the tests of modules."""

import pytest
import torch
from fusedseq import nn

from tests.support.attention_modules import D, N

POSITIONS = {
    "none": lambda: None,
    "alibi": lambda: nn.ALiBi(N),
    "bias": lambda: nn.RelativeBias(N, 8, 16),
    "keys": lambda: nn.RelativeKeys(2, D),
    "rotary": lambda: nn.Rotary(D, max_positions=3),
}


@pytest.fixture(autouse=True)
def recurrences_without_cudnn(request):
    """On a GPU torch.nn.LSTM and the like run without cuDNN, whose activations in fp32 have fewer
    bits than the oracle's, and which has no backward in eval mode."""
    if request.config.getoption("device") != "cuda":
        yield
        return
    with torch.backends.cudnn.flags(enabled=False):
        yield


@pytest.fixture(params=POSITIONS)
def positions(request):
    """A module of relative positions for MultiheadAttention, or None."""
    return POSITIONS[request.param]()
