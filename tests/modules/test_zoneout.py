"""Zoneout of every recurrent cell: the operators, and the modules with several layers."""

import pytest
import torch
from fusedseq import fused, nn, reference, testing
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence

pytestmark = [pytest.mark.cpu, pytest.mark.usefixtures("in_exact_dtype")]
T, B, X, H = 7, 4, 6, 5
CASES = {
    "lstm": testing.lstm_case(T, B, X, H),
    "gru": testing.hidden_state_case("gru", T, B, X, H),
    "rnn": testing.hidden_state_case("rnn", T, B, X, H),
    "layer_norm_gru": testing.hidden_state_case("layer_norm_gru", T, B, X, H),
    "peephole_lstm": testing.lstm_with_vectors_case("peephole_lstm", T, B, X, H),
    "layer_norm_lstm": testing.lstm_with_vectors_case("layer_norm_lstm", T, B, X, H),
}
MODULES = {
    "LSTM": nn.LSTM,
    "GRU": nn.GRU,
    "RNN": nn.RNN,
    "LayerNormGRU": nn.LayerNormGRU,
    "PeepholeLSTM": nn.PeepholeLSTM,
    "LayerNormLSTM": nn.LayerNormLSTM,
    "MogrifierLSTM": nn.MogrifierLSTM,
}
OPS = pytest.mark.parametrize("op", CASES)
NAMES = pytest.mark.parametrize("name", MODULES)


def zoneouts(p, q, name):
    """zoneout_h = p and, for an operator or a module with a c, zoneout_c = q."""
    return {"zoneout_h": p} | ({"zoneout_c": q} if "lstm" in name.lower() else {})


def outputs(op, **options):
    """y, and the tensors of the final state."""
    args, _ = CASES[op].inputs(dtype=torch.float64)
    y, state = getattr(fused, op)(*args, **options)
    return y, *(state if isinstance(state, tuple) else (state,))


@OPS
def test_zoneout_of_1_retains_the_initial_state(op):
    args, _ = CASES[op].inputs(dtype=torch.float64)
    initial = args[-2:] if "lstm" in op else args[-1:]
    y, *state = outputs(op, **zoneouts(1.0, 1.0, op))
    assert torch.equal(y, initial[0].expand_as(y))
    assert all(torch.equal(a, b) for a, b in zip(state, initial, strict=True))


@OPS
def test_in_evaluation_zoneout_is_its_expectation(op):
    """After one step, the mean over many masks of the state is the state in evaluation."""
    args, _ = CASES[op].inputs(dtype=torch.float64)
    args = [args[0][:1], *args[1:]]
    options = zoneouts(0.3, 0.6, op)
    function = getattr(fused, op)
    wanted, _ = function(*args, **options, training=False, seed=1)
    assert torch.equal(wanted, function(*args, **options, training=False, seed=2)[0])
    found = torch.stack([function(*args, **options, seed=s)[0] for s in range(2000)])
    # The mean of 2000 masks of a unit has a standard deviation of at most 0.011, and the new and
    # the old h differ by less than 2: the tolerance is more than five standard deviations.
    torch.testing.assert_close(found.mean(0), wanted, rtol=0, atol=0.12)
    assert len(found.unique(dim=0)) > 100


@OPS
def test_zoneout_of_0_changes_no_bit(op):
    without, seeded = outputs(op), outputs(op, **zoneouts(0.0, 0.0, op), seed=7)
    assert all(torch.equal(a, b) for a, b in zip(without, seeded, strict=True))


def test_an_lstm_with_zoneout_is_a_mogrifier_lstm_without_rounds():
    args, _ = CASES["lstm"].inputs()
    options = {"zoneout_h": 0.3, "zoneout_c": 0.5, "weight_drop": 0.2, "seed": 3}
    found = testing.run(fused.lstm, args, options)
    wanted = testing.run(fused.mogrifier_lstm, (*args, None, None), options | {"rounds": 0})
    for a, b in zip(found[0] + found[1], wanted[0] + wanted[1], strict=True):
        assert torch.equal(a, b)
    assert "mogrifier_lstm without rounds" in fused.explain("lstm", *args, **options)
    assert "mogrifier" not in fused.explain("lstm", *args, zoneout_h=0.0)


@pytest.mark.parametrize("p", [-0.1, 1.5, float("nan")], ids=str)
@OPS
def test_probabilities_outside_0_and_1_are_refused(op, p):
    args, _ = CASES[op].inputs()
    for name in zoneouts(p, p, op):
        for training in (True, False):
            with pytest.raises(ValueError, match=rf"^{op}: {name} must be in \[0, 1\], got {p}"):
                getattr(fused, op)(*args, **{name: p}, training=training)


@NAMES
def test_modules_refuse_them_too(name):
    for option in zoneouts(0.5, 0.5, name):
        with pytest.raises(ValueError, match=rf"^{name}: {option} must be in \[0, 1\], got 1.5"):
            MODULES[name](X, H, **{option: 1.5})


def test_zoneout_of_a_projected_h_is_refused():
    with pytest.raises(ValueError, match=r"LSTM: zoneout_h must be 0 with proj_size.*got 0.5"):
        nn.LSTM(X, H, proj_size=2, zoneout_h=0.5)
    nn.LSTM(X, H, proj_size=2, zoneout_c=0.5)(torch.randn(T, B, X))


def results(module, x):
    """Outputs and gradients, with the masks of one seed."""
    torch.manual_seed(2)
    y, state = module(x)
    state = state if isinstance(state, tuple) else (state,)
    values = [y.data if isinstance(y, PackedSequence) else y, *state]
    sum((v * v).sum() for v in values).backward()
    return [v.detach() for v in values] + [p.grad for p in module.parameters()]


def pair(name, **options):
    """A module of the fused operators, and its copy of the reference."""
    torch.manual_seed(1)
    options = {**zoneouts(0.3, 0.4, name), "num_layers": 2, **options}
    modules = [MODULES[name](X, H, **options, ops=ops).double() for ops in (fused, reference)]
    modules[1].load_state_dict(modules[0].state_dict())
    return modules


@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
@pytest.mark.parametrize("bidirectional", [False, True], ids=["forward", "both"])
@pytest.mark.parametrize("packed", [False, True], ids=["padded", "packed"])
@NAMES
def test_fused_and_reference_agree(name, packed, bidirectional, training):
    x = torch.randn(T, B, X, dtype=torch.float64)
    if packed:
        x = pack_padded_sequence(x, [3, 7, 1, 5], enforce_sorted=False)
    modules = pair(name, bidirectional=bidirectional, weight_drop=0.2)
    torch.testing.assert_close(*(results(m.train(training), x) for m in modules))


@NAMES
def test_each_forward_draws_new_masks(name):
    module, x = pair(name)[0], torch.randn(T, B, X, dtype=torch.float64)
    assert not torch.equal(module(x)[0], module(x)[0])
    module.eval()
    assert torch.equal(module(x)[0], module(x)[0])
    assert "zoneout_h=0.3" in repr(module)
