"""Argument checks of `lstm`, `bidirectional_lstm`, `mogrifier_lstm` and `mogrifier_lstm_pair`
beyond those that every operator has: rounds and their weights, lengths, and the layers of a pair.
"""

from importlib import import_module

import pytest
import torch
from fusedseq.testing import mogrifier_lstm_case

from tests.support.good_calls import B, H, T, X, call

FACTORS = {
    "Q's first": ("Q", ((2, 5, 3), (2, 2, 4)), r"Q.*\(2, 5, 2\).*got \(2, 5, 3\)"),
    "Q's second": ("Q", ((2, 5, 2), (2, 2, 5)), r"Q.*\(2, 2, 4\).*got \(2, 2, 5\)"),
    "R's second": ("R", ((1, 4, 2), (2, 2, 5)), r"R.*\(1, 2, 5\).*got \(2, 2, 5\)"),
    "rank 0": ("Q", ((2, 5, 0), (2, 0, 4)), r"Q.*rank.*got \(2, 0, 4\)"),
}


@pytest.mark.parametrize("name", FACTORS)
def test_wrong_factors(name):
    argument, shapes, message = FACTORS[name]
    with pytest.raises(ValueError, match=f"^mogrifier_lstm: {message}"):
        call("mogrifier_lstm of low rank", **{argument: tuple(torch.zeros(s) for s in shapes)})


def test_factors_that_are_not_a_pair():
    with pytest.raises(
        TypeError, match=r"^mogrifier_lstm: Q must be a tensor or a pair of factors, got"
    ):
        call("mogrifier_lstm", Q=(torch.zeros(2, 5, 2),))


@pytest.mark.parametrize(("rounds", "name"), [(1, "Q"), (2, "R"), (5, "R")])
def test_rounds_without_a_weight(rounds, name):
    weights = mogrifier_lstm_case(T, B, X, H, rounds).inputs()[0]
    given = {
        "Q": weights[6],
        "R": weights[7],
        "Q_bias": None,
        "R_bias": None,
        "rounds": rounds,
        name: None,
    }
    with pytest.raises(ValueError, match=rf"^mogrifier_lstm: {name} .*, got None"):
        call("mogrifier_lstm", **given)


def test_weights_may_be_none_without_rounds():
    assert call("mogrifier_lstm", rounds=0, Q=None, R=None, Q_bias=None, R_bias=None)


@pytest.mark.parametrize("rounds", [-1, -5])
def test_negative_rounds(rounds):
    with pytest.raises(ValueError, match=rf"^mogrifier_lstm: rounds .*, got {rounds}"):
        call("mogrifier_lstm", rounds=rounds)


@pytest.mark.parametrize("rounds", [1.5, "3", None])
def test_rounds_that_are_not_a_number(rounds):
    with pytest.raises((TypeError, ValueError), match=r"^mogrifier_lstm: rounds .*, got"):
        call("mogrifier_lstm", rounds=rounds)


@pytest.mark.parametrize("good", ["lstm", "bidirectional_lstm", "mogrifier_lstm"])
@pytest.mark.parametrize("bad", [-1, T + 1, 2**40])
def test_length_outside_the_sequence(good, bad):
    with pytest.raises(
        ValueError, match=rf"^{good}: lengths must be in \[0, T\] = \[0, 3\], got {bad}"
    ):
        call(good, lengths=torch.tensor([1, bad]))
    with pytest.raises(
        ValueError, match=rf"^{good}: lengths must be in \[0, T\] = \[0, 3\], got {bad}$"
    ):
        call(good, lengths=[1, bad])


@pytest.mark.parametrize("good", ["lstm", "bidirectional_lstm", "mogrifier_lstm"])
def test_wrong_lengths(good):
    with pytest.raises(ValueError, match=rf"^{good}: lengths must be \(B,\) = \(2,\), got \(3,\)"):
        call(good, lengths=torch.tensor([1, 2, 3]))
    with pytest.raises(ValueError, match=rf"^{good}: lengths must be \(B,\) = \(2,\), got \(1,\)"):
        call(good, lengths=[1])
    for dtype in (torch.int16, torch.float32, torch.bool):
        with pytest.raises(
            TypeError, match=rf"^{good}: lengths must be int64 or int32, got {dtype}"
        ):
            call(good, lengths=torch.tensor([1, 2], dtype=dtype))
    for value, found in (
        ([1, 2.0], r"list with \['float'\]"),
        ((True, 2), r"tuple with \['bool'\]"),
        (3, "int"),
    ):
        with pytest.raises(
            TypeError, match=rf"^{good}: lengths must be a tensor or a list of ints, got {found}"
        ):
            call(good, lengths=value)


@pytest.mark.parametrize("layer", ["first", "second"])
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_wrong_layer_of_a_pair(monkeypatch, layer, device):
    """The message names mogrifier_lstm, of which each layer is a call.

    On CUDA the pair is one operator, and its public function makes the checks.
    """
    monkeypatch.setattr(
        import_module("fusedseq.fused.mogrifier_lstm_pair"),
        "PAIRED",
        {"cpu"} if device == "cuda" else set(),
    )
    for name, value, wanted in (
        ("W_hh", torch.zeros(3, 3), r"W_hh must be \(4H, H\)"),
        ("W_ih", torch.zeros(16, 9), r"W_ih must be \(4H, X\)"),
        ("input_dropout", 1.5, r"input_dropout must be in \[0, 1\], got 1.5"),
        ("lengths", torch.tensor([1, 9]), r"lengths must be in \[0, T\]"),
        ("rounds", -1, "rounds must be a whole number"),
    ):
        with pytest.raises(ValueError, match=f"^mogrifier_lstm: {wanted}"):
            call(
                "mogrifier_lstm_pair",
                **{layer: lambda given, name=name, value=value: given | {name: value}},
            )
    with pytest.raises(
        TypeError, match=rf"^mogrifier_lstm_pair: {layer} must be a dict of .*, got tuple"
    ):
        call("mogrifier_lstm_pair", **{layer: ()})
    with pytest.raises(TypeError, match="no_option"):
        call("mogrifier_lstm_pair", **{layer: lambda given: given | {"no_option": 1}})
    with pytest.raises(TypeError, match=r"^mogrifier_lstm_pair: x must be a tensor, got int"):
        call("mogrifier_lstm_pair", x=3)
