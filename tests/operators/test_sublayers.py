"""ResidualLayerNorm and FeedForward, the modules around a Transformer's sublayers.

They are compared with torch's modules and load their state_dict. Further: random masks in training,
wrong arguments, and results so large that the kernels use non-temporal stores.
"""

import copy
import math
from types import SimpleNamespace

import pytest
import torch
from fusedseq import fused, nn, reference
from torch import nn as torch_nn


@pytest.mark.parametrize("prenorm", [False, True], ids=["post", "pre"])
def test_norm_equals_torch_and_loads_its_state_dict(prenorm, ops, device):
    theirs = torch_nn.LayerNorm(6, eps=1e-3, device=device)
    torch_nn.init.normal_(theirs.weight)
    ours = nn.ResidualLayerNorm(6, 0.5, eps=1e-3, prenorm=prenorm, ops=ops, device=device).eval()
    ours.load_state_dict(theirs.state_dict())
    x, residual = torch.randn(4, 3, 6, device=device), torch.randn(4, 3, 6, device=device)
    y = ours(x, residual)
    torch.testing.assert_close(
        y, (theirs(x + residual), x + residual) if prenorm else theirs(x + residual)
    )


@pytest.mark.parametrize("options", [{"bias": False}, {"elementwise_affine": False}], ids=str)
def test_norm_without_parameters(options, ops):
    ours, theirs = nn.ResidualLayerNorm(6, ops=ops, **options), torch_nn.LayerNorm(6, **options)
    assert ours.state_dict().keys() == theirs.state_dict().keys()
    x = torch.randn(4, 6)
    torch.testing.assert_close(ours(x), theirs(x))


def test_prenorm_modules_chain(ops, device):
    """x + sublayer(norm(x)), twice, as torch's encoder layer computes it with norm_first."""
    norms = [nn.ResidualLayerNorm(6, prenorm=True, ops=ops, device=device) for _ in range(2)]
    sublayer = torch_nn.Linear(6, 6, device=device)
    x = torch.randn(3, 6, device=device)
    y, s = norms[0](x)
    y, s = norms[1](sublayer(y), s)
    expected = x + sublayer(torch_nn.functional.layer_norm(x, (6,)))
    torch.testing.assert_close(s, expected)
    torch.testing.assert_close(y, torch_nn.functional.layer_norm(expected, (6,)))


@pytest.mark.parametrize(
    ("ours", "theirs"), [("relu", torch.relu), ("gelu", torch_nn.functional.gelu)]
)
def test_feed_forward_equals_torchs(ours, theirs, ops, device):
    layer = torch_nn.TransformerEncoderLayer(6, 2, 9, 0.0, theirs, device=device)
    module = nn.FeedForward(6, 9, 0.3, ours, ops=ops, device=device).eval()
    module.load_state_dict({k: v for k, v in layer.state_dict().items() if k.startswith("linear")})
    x = torch.randn(4, 3, 6, device=device)
    torch.testing.assert_close(module(x), layer._ff_block(x))


def test_feed_forward_calls_the_operators_linear():
    weights = []

    def linear(x, W, b=None):
        weights.append((tuple(W.shape), b is None))
        return reference.linear(x, W, b)

    ops = SimpleNamespace(linear=linear, bias_activation_dropout=reference.bias_activation_dropout)
    nn.FeedForward(6, 9, ops=ops)(torch.randn(4, 6))
    assert weights == [((9, 6), True), ((6, 9), False)]


LIMITS = [0.0, 1e-45, 1.0, 13.0, 14.0, 1e3, 1e18, 1e20, 1e35, 3e38, math.inf, math.nan]


@pytest.mark.parametrize("activation", ["relu", "gelu", "gelu_tanh", "tanh"])
@pytest.mark.parametrize("dy", [1.0, math.inf, math.nan])
def test_activations_at_their_limits_are_torchs(activation, dy, device, dtype):
    """At numbers whose square overflows, infinities and NaN, and for such gradients. torch's own
    kernels are asked: on some processors it calls oneDNN, whose gelu(inf) is NaN.
    """
    values = torch.tensor([*LIMITS, *(-x for x in LIMITS)], dtype=torch.float64)
    rounded = dtype in (torch.bfloat16, torch.float16)
    if rounded or dy != 1:
        # A derivative that is rounded to 0 or not makes 0 * inf or not: these are left out.
        values = values[(values.abs() < 2) | (values.abs() > 20)]
    found = []
    for ops in (fused, reference):
        x = values.to(device, dtype).requires_grad_()
        with torch.backends.mkldnn.flags(enabled=False):
            y = ops.bias_activation_dropout(x, None, activation)
        (dx,) = torch.autograd.grad(y, x, torch.full_like(y, dy))
        found.append((y.detach(), dx))
    for ours, expected in zip(*found, strict=True):
        torch.testing.assert_close(ours, expected, equal_nan=True, rtol=None, atol=None)


MODULES = {
    "norm": lambda ops: nn.ResidualLayerNorm(6, 0.4, ops=ops),
    "feed_forward": lambda ops: nn.FeedForward(6, 9, 0.4, ops=ops),
}


@pytest.mark.parametrize("name", MODULES)
def test_masks_are_drawn_only_in_training(name, ops, device):
    module, x = MODULES[name](ops).to(device), torch.randn(5, 6, device=device)
    results = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        results.append(module(x))
    assert torch.equal(results[0], results[1])
    assert not torch.equal(results[0], results[2])
    module.eval()
    assert torch.equal(module(x), copy.deepcopy(module)(x))


@pytest.mark.parametrize("build", [nn.ResidualLayerNorm, nn.FeedForward])
def test_a_wrong_probability_is_named(build):
    message = rf"^{build.__name__}: dropout must be in \[0, 1\], got 1.5"
    with pytest.raises(ValueError, match=message):
        build(6, dropout=1.5)


LARGE = {
    "dropout": ((2560, 1001), lambda x: fused.dropout(x, 0.5, 5)),
    "residual_layer_norm": ((2560, 1001), lambda x: fused.residual_layer_norm(x, x, p=0.1, seed=5)),
    "attention": ((20, 8, 256, 64), lambda x: fused.attention(x, x, x)),
}


@pytest.mark.parametrize("op", LARGE)
def test_a_large_result_begins_with_the_result_of_its_first_rows(op, threads):
    """Results of 8 MiB and more are written by non-temporal stores, also to unaligned rows."""
    threads(2)
    shape, call = LARGE[op]
    x = torch.randn(shape)
    whole, few = (t.clone().requires_grad_() for t in (x, x[:3]))
    y, first = call(whole), call(few)
    y.sum().backward()
    first.sum().backward()
    torch.testing.assert_close(y[:3], first)
    torch.testing.assert_close(whole.grad[:3], few.grad)
