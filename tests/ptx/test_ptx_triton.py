"""Triton kernels as the PTX for sm_80: masks, norms and activations, against their oracles."""

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
