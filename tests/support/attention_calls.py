"""Inputs and calls of the tests of `attention`."""

import pytest
import torch
from fusedseq import fused, reference
from fusedseq.testing import run

from tests.support.placement import here

OPERATORS = pytest.mark.parametrize(
    "op", [fused.attention, reference.attention], ids=["fused", "reference"]
)


def qkv(B, N, L, S, D, N_kv=None, dtype=torch.float32):
    """Returns random q (B, N, L, D), and k and v (B, N_kv, S, D)."""
    return [
        torch.randn(B, n, length, D, dtype=dtype)
        for n, length in ((N, L), (N_kv or N, S), (N_kv or N, S))
    ]


def with_gradients(*args, op=fused.attention, **options):
    """The result, and the gradients of q, k, v and, where given, of bias and relative_keys."""
    results, grads = run(op, args, here(options))
    return [*results, *grads]


def assert_same(got, expected):
    for i, (a, b) in enumerate(zip(got, expected, strict=True)):
        assert torch.equal(a, b), f"tensor {i}: {(a != b).sum()} of {a.numel()} elements differ"
