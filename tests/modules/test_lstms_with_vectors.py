"""nn.PeepholeLSTM and nn.LayerNormLSTM, and properties of their operators."""

import copy

import pytest
import torch
from fusedseq import fused, nn, reference, testing
from torch.nn.utils import rnn

pytestmark = [pytest.mark.cpu, pytest.mark.usefixtures("in_exact_dtype")]
T, B, X, H = 7, 4, 6, 5
OPS = ["peephole_lstm", "layer_norm_lstm"]
CASES = {op: testing.lstm_with_vectors_case(op, T, B, X, H) for op in OPS}
MODULES = {"peephole": nn.PeepholeLSTM, "layer_norm": nn.LayerNormLSTM}
OPTIONS = {
    "two layers": {"num_layers": 2},
    "sizes": {"hidden_size": [5, 4, 3], "num_layers": 3},
    "no bias": {"bias": False},
    "dropout": {"num_layers": 2, "dropout": 0.4, "weight_drop": 0.3},
    "variational": {"locked_input": False, "weight_drop": 0.3, "variational": True},
    "zoneout": {"num_layers": 2, "zoneout_h": 0.3, "zoneout_c": 0.2, "weight_drop": 0.3},
    "zoneout of c": {"zoneout_c": 0.5, "bidirectional": True},
    "residual": {"hidden_size": X, "num_layers": 3, "residual": True, "output": "sum"},
    "batch_first": {"batch_first": True},
    "bidirectional": {"num_layers": 2, "bidirectional": True, "weight_drop": 0.3},
}


def build(name, ops, options):
    torch.manual_seed(1)
    module = MODULES[name](**{"input_size": X, "hidden_size": H, **options}, ops=ops)
    with torch.no_grad():
        for parameter in module.parameters():  # also those that begin as ones and zeros
            parameter.add_(0.1 * torch.randn(parameter.shape))
    return module.double()


def outputs_and_gradients(module, *args, **kwargs):
    torch.manual_seed(2)
    y, state = module(*args, **kwargs)
    values = [y.data if isinstance(y, rnn.PackedSequence) else y, *(t for s in state for t in s)]
    sum((v * v).sum() for v in values).backward()
    return [v.detach() for v in values] + [p.grad for p in module.parameters()]


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("name", MODULES)
def test_fused_and_reference_agree(name, options):
    x = torch.randn(T, B, X, dtype=torch.float64)
    found = [
        outputs_and_gradients(build(name, ops, OPTIONS[options]), x) for ops in (fused, reference)
    ]
    torch.testing.assert_close(*found)


@pytest.mark.parametrize("options", ["two layers", "bidirectional"])
@pytest.mark.parametrize("name", MODULES)
def test_packed_ragged_and_lengths_agree(name, options):
    module = build(name, fused, OPTIONS[options]).eval()
    x, lengths = torch.randn(T, B, X, dtype=torch.float64), [3, 7, 1, 5]
    y, state = module(x, lengths=lengths)
    packed = rnn.pack_padded_sequence(x, lengths, enforce_sorted=False)
    y_packed, state_packed = module(packed)
    torch.testing.assert_close(rnn.pad_packed_sequence(y_packed)[0], y)
    torch.testing.assert_close(state_packed, state)
    tokens = torch.cat([x[:n, i] for i, n in enumerate(lengths)])
    cu_seqlens = torch.tensor([0, 3, 10, 11, 16])
    y_ragged, state_ragged = module(tokens, cu_seqlens=cu_seqlens)
    torch.testing.assert_close(y_ragged, torch.cat([y[:n, i] for i, n in enumerate(lengths)]))
    torch.testing.assert_close(state_ragged, state)


@pytest.mark.parametrize("name", MODULES)
def test_a_checkpoint_moves_between_fused_and_reference(name):
    first, second = build(name, fused, {}), MODULES[name](X, H, ops=reference).double()
    second.load_state_dict(first.state_dict())
    x = torch.randn(T, B, X, dtype=torch.float64)
    torch.testing.assert_close(first(x), second(x))
    assert repr(copy.deepcopy(first)) == repr(first)


def test_an_eps_below_zero_is_refused():
    with pytest.raises(ValueError, match=r"^LayerNormLSTM: eps must be at least 0, got -1"):
        nn.LayerNormLSTM(X, H, eps=-1.0)
    args, _ = CASES["layer_norm_lstm"].inputs()
    with pytest.raises(ValueError, match=r"^layer_norm_lstm: eps must be at least 0, got -1"):
        fused.layer_norm_lstm(*args, eps=-1.0)


@pytest.mark.parametrize(
    ("op", "name", "wanted"),
    [
        ("peephole_lstm", "peephole", r"\(3H,\) = \(15,\)"),
        ("layer_norm_lstm", "gamma_ih", r"\(4H,\) = \(20,\)"),
        ("layer_norm_lstm", "gamma_hh", r"\(4H,\) = \(20,\)"),
        ("layer_norm_lstm", "gamma_c", r"\(H,\) = \(5,\)"),
        ("layer_norm_lstm", "beta_c", r"\(H,\) = \(5,\)"),
    ],
)
def test_a_vector_of_the_wrong_shape_is_refused(op, name, wanted):
    args, kwargs = CASES[op].inputs()
    position = testing.names(op, args, kwargs).index(name)
    args = [*args[:position], args[0].new_ones(7), *args[position + 1 :]]
    with pytest.raises(ValueError, match=rf"^{op}: {name} must be {wanted}, got \(7,\)"):
        getattr(fused, op)(*args, **kwargs)


def test_zero_peepholes_are_an_lstm():
    x, W_ih, W_hh, b, peephole, h0, c0 = CASES["peephole_lstm"].inputs(dtype=torch.float64)[0]
    found = fused.peephole_lstm(x, W_ih, W_hh, b, torch.zeros_like(peephole), h0, c0)
    torch.testing.assert_close(found, fused.lstm(x, W_ih, W_hh, b, h0, c0))


def test_the_scale_of_a_normalized_product_does_not_matter():
    args = CASES["layer_norm_lstm"].inputs(dtype=torch.float64)[0]
    scaled = [args[0], 3 * args[1], 0.5 * args[2], *args[3:]]
    found = fused.layer_norm_lstm(*args, eps=0.0)
    torch.testing.assert_close(fused.layer_norm_lstm(*scaled, eps=0.0), found)


@pytest.mark.parametrize("op", OPS)
def test_two_segments_equal_one(op):
    *args, h0, c0 = CASES[op].inputs(dtype=torch.float64)[0]
    function = getattr(fused, op)
    y, last = function(*args, h0, c0)
    y_first, state = function(args[0][:3], *args[1:], h0, c0)
    y_second, last_of_two = function(args[0][3:], *args[1:], *state)
    torch.testing.assert_close((torch.cat([y_first, y_second]), last_of_two), (y, last))


@pytest.mark.parametrize("op", OPS)
def test_values_behind_the_end_of_a_sequence_are_not_used(op):
    args, kwargs = CASES[op].inputs()
    kwargs = {**kwargs, "lengths": torch.tensor([3, 7, 0, 5])}
    broken = args[0].clone()
    for i, n in enumerate(kwargs["lengths"].tolist()):
        broken[n:, i] = torch.nan
    wanted = testing.run(getattr(fused, op), args, kwargs)
    found = testing.run(getattr(fused, op), (broken, *args[1:]), kwargs)
    for a, b in zip(wanted[0] + wanted[1], found[0] + found[1], strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("op", OPS)
def test_explain_names_the_kernel(op):
    args, kwargs = CASES[op].inputs()
    assert "csrc/cpu/recurrence/forward.h" in fused.explain(op, *args, **kwargs)
    meta = testing.convert(args, "meta")
    assert f"fusedseq.reference.{op}" in fused.explain(op, *meta)


@pytest.mark.parametrize("name", MODULES)
def test_a_compiled_module_equals_the_eager_one(name):
    module = build(name, fused, {"num_layers": 2}).eval()
    x = torch.randn(T, B, X, dtype=torch.float64)
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(
        outputs_and_gradients(compiled, x), outputs_and_gradients(copy.deepcopy(module), x)
    )


@pytest.mark.parametrize("op", OPS)
def test_second_derivatives(op):
    args, _ = testing.lstm_with_vectors_case(op, 2, 2, 3, 3).inputs(dtype=torch.float64)
    args = [t.requires_grad_() for t in args]
    assert torch.autograd.gradgradcheck(lambda *a: getattr(fused, op)(*a)[0], args)
