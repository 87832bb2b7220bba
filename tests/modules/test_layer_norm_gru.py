"""nn.LayerNormGRU, and properties of its operator."""

import copy

import pytest
import torch
from fusedseq import fused, nn, reference, testing

pytestmark = [pytest.mark.cpu, pytest.mark.usefixtures("in_exact_dtype")]
T, B, X, H = 7, 4, 6, 5
OP = "layer_norm_gru"
CASE = testing.hidden_state_case(OP, T, B, X, H)
OPTIONS = {
    "two layers": {"num_layers": 2},
    "sizes": {"hidden_size": [5, 4, 3], "num_layers": 3},
    "no bias": {"bias": False, "eps": 0.1},
    "dropout": {"num_layers": 2, "dropout": 0.4, "weight_drop": 0.3, "zoneout_h": 0.2},
    "variational": {"locked_input": False, "weight_drop": 0.3, "variational": True},
    "residual": {"hidden_size": X, "num_layers": 3, "residual": True, "output": "sum"},
    "batch_first": {"batch_first": True},
    "bidirectional": {"num_layers": 2, "bidirectional": True, "weight_drop": 0.3},
}


def build(ops, options):
    torch.manual_seed(1)
    module = nn.LayerNormGRU(**{"input_size": X, "hidden_size": H, **options}, ops=ops)
    with torch.no_grad():
        for parameter in module.parameters():  # also those that begin as ones
            parameter.add_(0.1 * torch.randn(parameter.shape))
    return module.double()


def outputs_and_gradients(module, x):
    torch.manual_seed(2)
    y, h = module(x)
    values = [y, *h]
    sum((v * v).sum() for v in values).backward()
    return [v.detach() for v in values] + [p.grad for p in module.parameters()]


@pytest.mark.parametrize("options", OPTIONS)
def test_fused_and_reference_agree(options):
    x = torch.randn(T, B, X, dtype=torch.float64)
    found = [outputs_and_gradients(build(ops, OPTIONS[options]), x) for ops in (fused, reference)]
    torch.testing.assert_close(*found)


def test_a_checkpoint_moves_between_fused_and_reference():
    first, second = build(fused, {}), nn.LayerNormGRU(X, H, ops=reference).double()
    second.load_state_dict(first.state_dict())
    x = torch.randn(T, B, X, dtype=torch.float64)
    torch.testing.assert_close(first(x), second(x))
    assert repr(copy.deepcopy(first)) == repr(first)
    assert "eps=0.5" in repr(nn.LayerNormGRU(X, H, eps=0.5))


def test_an_eps_below_zero_is_refused():
    with pytest.raises(ValueError, match=r"^LayerNormGRU: eps must be at least 0, got -1"):
        nn.LayerNormGRU(X, H, eps=-1.0)
    with pytest.raises(ValueError, match=r"^layer_norm_gru: eps must be at least 0, got -1"):
        fused.layer_norm_gru(*CASE.inputs()[0], eps=-1.0)


@pytest.mark.parametrize("name", ["gamma_ih", "gamma_hh"])
def test_a_vector_of_the_wrong_shape_is_refused(name):
    args, kwargs = CASE.inputs()
    position = testing.names(OP, args, kwargs).index(name)
    args = [*args[:position], args[0].new_ones(7), *args[position + 1 :]]
    with pytest.raises(ValueError, match=rf"^{OP}: {name} must be \(3H,\) = \(15,\), got \(7,\)"):
        fused.layer_norm_gru(*args)


def test_one_step_is_the_formula():
    x, W_ih, W_hh, b, _, _, h0 = CASE.inputs(dtype=torch.float64)[0]
    ones = torch.ones(3 * H, dtype=torch.float64)
    y, _ = fused.layer_norm_gru(x[:1], W_ih, W_hh, b, ones, ones, h0, eps=0.0)

    def norm(v):
        return (v - v.mean(-1, keepdim=True)) / v.std(-1, correction=0, keepdim=True)

    from_x, from_h = norm(x[0] @ W_ih.T), norm(h0 @ W_hh.T)
    r, z, n = from_x.chunk(3, -1)
    r_h, z_h, n_h = from_h.chunk(3, -1)
    b_r, b_z, b_in, b_hn = b.chunk(4)
    r, z = (r + r_h + b_r).sigmoid(), (z + z_h + b_z).sigmoid()
    n = (n + b_in + r * (n_h + b_hn)).tanh()
    torch.testing.assert_close(y[0], (1 - z) * n + z * h0)


def test_the_scale_of_a_product_does_not_matter():
    args = CASE.inputs(dtype=torch.float64)[0]
    scaled = [args[0], 3 * args[1], 0.5 * args[2], *args[3:]]
    found = fused.layer_norm_gru(*args, eps=0.0)
    torch.testing.assert_close(fused.layer_norm_gru(*scaled, eps=0.0), found)


def test_two_segments_equal_one():
    *args, h0 = CASE.inputs(dtype=torch.float64)[0]
    y, last = fused.layer_norm_gru(*args, h0)
    y_first, h = fused.layer_norm_gru(args[0][:3], *args[1:], h0)
    y_second, last_of_two = fused.layer_norm_gru(args[0][3:], *args[1:], h)
    torch.testing.assert_close((torch.cat([y_first, y_second]), last_of_two), (y, last))


def test_values_behind_the_end_of_a_sequence_are_not_used():
    args, kwargs = CASE.inputs()
    kwargs = {**kwargs, "lengths": torch.tensor([3, 7, 0, 5])}
    broken = args[0].clone()
    for i, n in enumerate(kwargs["lengths"].tolist()):
        broken[n:, i] = torch.nan
    wanted = testing.run(fused.layer_norm_gru, args, kwargs)
    found = testing.run(fused.layer_norm_gru, (broken, *args[1:]), kwargs)
    for a, b in zip(wanted[0] + wanted[1], found[0] + found[1], strict=True):
        assert torch.equal(a, b)


def test_explain_names_the_kernel():
    args, kwargs = CASE.inputs()
    assert "csrc/cpu/recurrence/forward.h" in fused.explain(OP, *args, **kwargs)
    assert f"fusedseq.reference.{OP}" in fused.explain(OP, *testing.convert(args, "meta"))


def test_a_compiled_module_equals_the_eager_one():
    module = build(fused, {"num_layers": 2}).eval()
    x = torch.randn(T, B, X, dtype=torch.float64)
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(
        outputs_and_gradients(compiled, x), outputs_and_gradients(copy.deepcopy(module), x)
    )


def test_second_derivatives():
    args, _ = testing.hidden_state_case(OP, 2, 2, 3, 3).inputs(dtype=torch.float64)
    args = [t.requires_grad_() for t in args]
    assert torch.autograd.gradgradcheck(lambda *a: fused.layer_norm_gru(*a)[0], args)
