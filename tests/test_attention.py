"""What attention means: what may not matter does not, bit for bit; what the papers say holds, written out again here."""

import math

import pytest
import torch
from fusedseq import fused, reference
from fusedseq.testing import run

INF, NAN = math.inf, math.nan


def qkv(B, N, L, S, D, dtype=torch.float32, N_kv=None):
    return [torch.randn(B, n, length, D, dtype=dtype) for n, length in ((N, L), (N_kv or N, S), (N_kv or N, S))]


def with_gradients(*args, op=fused.attention, **options):
    """The result and the gradients of q, k, v and of the bias and relative_keys there are."""
    results, grads = run(op, args, options)
    return [*results, *grads]


def assert_same(got, wanted):
    for i, (a, b) in enumerate(zip(got, wanted, strict=True)):
        assert torch.equal(a, b), f"tensor {i}: {(a != b).sum()} of {a.numel()} differ"


@pytest.mark.parametrize("op", [fused.attention, reference.attention], ids=["fused", "reference"])
def test_nan_in_a_query_comes_out(op):
    """It is no mask: a query of NaN must not look like one that sees nothing."""
    q, k, v = qkv(2, 2, 5, 20, 3)
    q[1, 0, 2] = NAN
    y, *grads = with_gradients(q, k, v, op=op)
    assert y[1, 0, 2].isnan().all()
    assert y.isnan().sum() == 3
    assert grads[0][1, 0, 2].isnan().all()
