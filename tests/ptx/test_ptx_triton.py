"""Triton kernels as PTX for sm_80: masks, norms, activations, attention, against their oracles."""

import os
import platform
import shutil

import pytest
import torch
from fusedseq import kernels, reference

from tests.simt import build as simt

pytest.importorskip("triton")
pytestmark = pytest.mark.skipif(
    platform.machine() != "x86_64"
    or not shutil.which(simt.CXX)
    or "TRITON_INTERPRET" in os.environ,
    reason="tests/simt needs g++ on x86-64; Triton's interpreter compiles nothing",
)
SEED = torch.tensor([7])


@pytest.fixture
def ran():
    from tests.ptx import triton_kernels

    with triton_kernels.simulated() as names:
        yield names


def test_dropout_mask(ran):
    found = kernels.module("dropout_mask").dropout_mask(SEED, 0.3, (13, 21))
    assert ran == ["mask_kernel"]
    assert torch.equal(found, reference.dropout_mask(SEED, 0.3, (13, 21)))


@pytest.mark.parametrize("own", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("D", [40, 512])
def test_residual_layer_norm(ran, own, D):
    x, residual, weight, bias = (torch.randn(n, D).to(own) for n in (6, 6, 1, 1))
    weight, bias = weight[0], bias[0]
    module = kernels.module("residual_layer_norm")
    y, *_ = module.residual_layer_norm(x, residual, weight, bias, 0.3, 1e-5, False, SEED)
    assert ran == ["forward_kernel"]
    exact, plain = (
        reference.residual_layer_norm(
            *(t.to(dtype) for t in (x, residual, weight, bias)), p=0.3, seed=SEED
        ).double()
        for dtype in (torch.float64, own)
    )
    budget = 2 * (plain - exact).abs().max() + 2 * torch.finfo(own).eps * exact.abs().max()
    assert (y.double() - exact).abs().max() <= budget


@pytest.mark.parametrize("activation", ["relu", "gelu", "gelu_tanh", "tanh"])
@pytest.mark.parametrize("own", [torch.float32, torch.bfloat16], ids=str)
def test_bias_activation_dropout(ran, own, activation):
    x, b = torch.randn(9, 70).to(own), torch.randn(70).to(own)
    module = kernels.module("bias_activation_dropout")
    y = module.bias_activation_dropout(x, b, activation, 0.3, SEED)
    assert ran == ["forward_kernel"]
    exact, plain = (
        reference.bias_activation_dropout(x.to(d), b.to(d), activation, 0.3, SEED).double()
        for d in (torch.float64, own)
    )
    budget = 2 * (plain - exact).abs().max() + 2 * torch.finfo(own).eps * exact.abs().max()
    assert (y.double() - exact).abs().max() <= budget


def softmax_attention(q, k, v, causal, dtype):
    """(B, N, L, D) each; gradients of the sum of squares / 2 follow the result."""
    q, k, v = (t.to(dtype).requires_grad_() for t in (q, k, v))
    logits = q @ k.transpose(-1, -2) * q.size(-1) ** -0.5
    if causal:
        logits = logits.masked_fill(torch.ones_like(logits).triu(1).bool(), -torch.inf)
    out = logits.softmax(-1) @ v
    return [out, *torch.autograd.grad(out.square().sum() / 2, (q, k, v))]


@pytest.mark.parametrize(
    ("L", "causal", "names"),
    [
        (6, False, ["packed_forward", "packed_backward"]),
        (40, True, ["row_forward", "row_backward"]),
        (
            150,
            True,
            ["tiled_forward", "tiled_delta", "tiled_backward_keys", "tiled_backward_queries"],
        ),
    ],
)
def test_attention(ran, L, causal, names):
    """ldmatrix, mma and, in the tiled kernels, cp.async."""
    B, N, D, own = 1, 2, 32, torch.bfloat16
    q, k, v = (torch.randn(B, L, N, D).to(own).transpose(1, 2) for _ in range(3))
    inputs = [q, k, v, None, None, None, None, None, None, False]
    settings = [SEED, D**-0.5, causal, 0, 0.0]
    module = kernels.module("attention")
    out, lse = module.attention(*inputs, None, *settings)
    gradients = module.attention_backward(out, out, lse, *inputs, *settings, 7)
    assert set(ran) == set(names)
    exact = softmax_attention(q, k, v, causal, torch.float64)
    plain = softmax_attention(q, k, v, causal, own)
    for found, e, p in zip([out, *gradients[:3]], exact, plain, strict=True):
        budget = 2 * (p.double() - e).abs().max() + 2 * torch.finfo(own).eps * e.abs().max()
        assert (found.double() - e).abs().max() <= budget
