"""Values that are not finite: what a zoneout or a dropout of the state leaves out may be NaN or
infinite, and NaN is where the oracle has it. Weights that share their memory."""

import pytest
import torch
from fusedseq import fused, reference

T, B, X, H = 4, 3, 5, 17
KEPT = {"zoneout_h": 0.5, "seed": 3, "training": True}


def lstm_call(**changed):
    torch.manual_seed(0)
    shapes = {"x": (T, B, X), "W_ih": (4 * H, X), "W_hh": (4 * H, H), "b": (4 * H,)}
    shapes |= {"h0": (B, H), "c0": (B, H)}
    return {name: torch.randn(shape) for name, shape in shapes.items()} | changed


def test_a_unit_that_is_kept_is_not_the_new_one():
    call = lstm_call()
    call["W_hh"].zero_()
    call["b"][3 * H :] = torch.nan  # of the output gates: every new h is NaN
    y, _ = fused.lstm(**call, **KEPT)
    expected, _ = reference.lstm(**call, **KEPT)
    assert 0 < expected[0].isnan().sum() < expected[0].numel()
    torch.testing.assert_close(y, expected, equal_nan=True)


def test_the_gradient_of_a_unit_that_is_kept_does_not_reach_the_cell():
    call = {name: t[:1] if name == "x" else t for name, t in lstm_call().items()}
    kept = fused.lstm(**call, **KEPT)[0] == call["h0"]
    assert 0 < kept.sum() < kept.numel()
    gradients = {}
    for ops in (fused, reference):
        leaves = {name: t.clone().requires_grad_() for name, t in call.items()}
        y, _ = ops.lstm(**leaves, **KEPT)
        y.backward(torch.where(kept, torch.inf, torch.ones(())))
        gradients[ops] = {name: t.grad for name, t in leaves.items()}
    assert gradients[reference]["W_ih"].isfinite().all()
    for name, expected in gradients[reference].items():
        torch.testing.assert_close(
            gradients[fused][name], expected, msg=lambda m, n=name: f"{n}: {m}"
        )


@pytest.mark.parametrize("rounds", [0, 2])
def test_a_state_that_is_dropped_is_not_used(rounds):
    call = lstm_call()
    weights = {"Q": None, "R": None}
    if rounds:
        weights = {"Q": torch.randn(1, X, H), "R": torch.randn(1, H, X)}
    options = {"rounds": rounds, "state_dropout": 0.5, "seed": 5, "training": True}
    dropped = reference.mogrifier_lstm(**call, **weights, **options)[0]
    for j in range(H):  # an infinite unit of h0 changes nothing if it is dropped
        h0 = call["h0"].clone()
        h0[0, j] = torch.inf
        changed = call | {"h0": h0}
        expected, _ = reference.mogrifier_lstm(**changed, **weights, **options)
        y, _ = fused.mogrifier_lstm(**changed, **weights, **options)
        if torch.equal(expected, dropped):
            torch.testing.assert_close(y, expected)
            return
    pytest.fail("no unit is dropped")


@pytest.mark.parametrize("gate", range(4))
@pytest.mark.parametrize("own", [torch.float32, torch.float64, torch.bfloat16], ids=str)
def test_nan_in_a_gate_reaches_the_result_with_a_capped_input_gate(gate, own):
    call = lstm_call()
    call["b"][gate * H] = torch.nan
    call = {name: t.to(own) for name, t in call.items()}
    options = {"Q": torch.zeros(1, X, H, dtype=own), "R": None, "rounds": 1}
    y, _ = fused.mogrifier_lstm(**call, **options, cap_input_gate=True)
    expected, _ = reference.mogrifier_lstm(**call, **options, cap_input_gate=True)
    assert expected.isnan().any()
    assert torch.equal(y.isnan(), expected.isnan())


def gradients_of_cell_weights(op, call, dy, **options):
    """The gradients of each operand from the fused operator and from the reference."""
    found = []
    for ops in (fused, reference):
        leaves = {name: t.clone().requires_grad_() for name, t in call.items()}
        getattr(ops, op)(**leaves, **options)[0].backward(dy)
        found.append({name: t.grad for name, t in leaves.items()})
    return found


@pytest.mark.parametrize("own", [torch.float32, torch.float64], ids=str)
def test_an_infinite_gradient_of_a_capped_input_gate_reaches_one_gate(own):
    call = {name: t[:1] if name == "x" else t for name, t in lstm_call().items()}
    call = {name: t.to(own) for name, t in call.items()}
    call["c0"].zero_()  # the gradient of the forget gate is that of the cap alone
    call["W_hh"].zero_()
    dy = torch.zeros(1, B, H, dtype=own)
    dy[0, 0] = torch.inf
    options = {"Q": None, "R": None, "rounds": 0, "cap_input_gate": True}
    found, expected = gradients_of_cell_weights("mogrifier_lstm", call, dy, **options)
    assert expected["b"].isfinite().any()
    torch.testing.assert_close(found["b"], expected["b"], equal_nan=True)


@pytest.mark.parametrize("own", [torch.float32, torch.float64], ids=str)
def test_the_gradient_of_a_rectified_unit_that_is_nan_is_that_of_relu(own):
    torch.manual_seed(0)
    shapes = {"x": (1, B, X), "W_ih": (H, X), "W_hh": (H, H), "b": (H,), "h0": (B, H)}
    call = {name: torch.randn(shape).to(own) for name, shape in shapes.items()}
    call["b"][2] = torch.nan
    dy = torch.randn(1, B, H).to(own)
    found, expected = gradients_of_cell_weights("rnn", call, dy, relu=True)
    assert expected["b"][2] != 0
    torch.testing.assert_close(found["b"], expected["b"])


@pytest.mark.parametrize("rounds", [0, 2])
def test_a_state_that_is_dropped_has_no_part_in_the_gradients_of_weights(rounds):
    call = lstm_call()
    call["h0"][0] = torch.nan
    if rounds:
        call |= {"Q": torch.randn(1, X, H), "R": torch.randn(1, H, X)}
    options = {"rounds": rounds, "state_dropout": 1.0, "seed": 5, "training": True}
    options |= {} if rounds else {"Q": None, "R": None}
    gradients = {}
    for ops in (fused, reference):
        leaves = {name: t.clone().requires_grad_() for name, t in call.items()}
        ops.mogrifier_lstm(**leaves, **options)[0].sum().backward()
        gradients[ops] = [leaves[name].grad for name in leaves if name != "h0"]
    assert all(t.isfinite().all() for t in gradients[reference])
    torch.testing.assert_close(gradients[fused], gradients[reference])


def attention_call(L, S, D=16):
    torch.manual_seed(0)
    return {name: torch.randn(1, 2, n, D) for name, n in (("q", L), ("k", S), ("v", S))}


def nan_key(call, options):
    call["k"][0, 0, 1, 0] = torch.nan


def overflowing(call, options):
    call["q"][0, 0, 0], call["k"][0, 0, 1] = 1e20, 1e20


def overflowing_behind_a_mask(call, options):
    overflowing(call, options)
    options["mask"] = torch.ones(call["q"].size(2), call["k"].size(2), dtype=torch.bool)
    options["mask"][0, 1] = False


def nan_query_without_keys(call, options):
    call["q"][0, 0, 2] = torch.nan
    options["mask"] = torch.ones(call["q"].size(2), call["k"].size(2), dtype=torch.bool)
    options["mask"][2] = False


def nan_query_with_a_window(call, options):
    call["q"][0, 0, 2] = torch.nan
    options["window"] = (2, 1)


@pytest.mark.parametrize("own", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("sizes", [(4, 4), (5, 6), (5, 40), (20, 70)], ids=str)
@pytest.mark.parametrize(
    "change",
    [
        nan_key,
        overflowing,
        overflowing_behind_a_mask,
        nan_query_without_keys,
        nan_query_with_a_window,
    ],
    ids=lambda change: change.__name__,
)
def test_nan_of_attention_is_where_the_oracle_has_it(change, sizes, own):
    call, options, found = attention_call(*sizes), {}, []
    change(call, options)
    for ops in (fused, reference):
        leaves = [t.to(own).requires_grad_() for t in call.values()]
        y = ops.attention(*leaves, **options)
        found.append([y, *torch.autograd.grad(y.sum(), leaves)])
    for name, got, expected in zip(("y", "dq", "dk", "dv"), *found, strict=True):
        if name == "dk" and change is nan_query_with_a_window:  # where the oracle multiplies 0 NaN
            assert not (got.isnan() & ~expected.isnan()).any()
        else:
            assert torch.equal(got.isnan(), expected.isnan()), name


@pytest.mark.parametrize("sizes", [(3, 5), (64, 1), (4, 4)], ids=str)
def test_weights_of_both_operands_may_share_their_memory(sizes):
    X, H = sizes
    torch.manual_seed(0)
    shapes = {"x": (T, B, X), "W_ih": (4 * H, X), "W_hh": (4 * H, H), "b": (4 * H,)}
    shapes |= {"h0": (B, H), "c0": (B, H)}
    call = {name: torch.randn(shape, dtype=torch.float64) for name, shape in shapes.items()}
    Q, results = torch.randn(1, X, H, dtype=torch.float64, requires_grad=True), []
    for ops in (fused, reference):
        y, _ = ops.mogrifier_lstm(**call, Q=Q, R=Q.view(1, H, X), rounds=2)
        results.append((y, *torch.autograd.grad(y.square().sum(), Q)))
    torch.testing.assert_close(*results)
