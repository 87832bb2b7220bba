"""Comparisons with the oracle where the capped input gate has ties: `fusedseq.testing.ties`."""

import math

import pytest
import torch
from fusedseq import reference, testing
from fusedseq.testing import ties


def inputs(bias_of_i):
    """Inputs of one step whose gates i and f are 1/2, but for a bias of i."""
    args, kwargs = testing.mogrifier_lstm_case(1, 3, 4, 5, 2, cap_input_gate=True).inputs(
        "cpu", torch.float32
    )
    arguments = dict(zip(("x", "W_ih", "W_hh", "b", "h0"), args, strict=False))
    for name in ("x", "b", "h0"):
        arguments[name].zero_()
    arguments["b"][:5] = bias_of_i
    return args, kwargs


def taking(margin):
    """The oracle, which takes i where i < 1 - f + margin."""

    def call(*args, **kwargs):
        with ties.TakesFirst(margin):
            return reference.mogrifier_lstm(*args, **kwargs)

    return call


@pytest.mark.parametrize("margin", [1e-7, -1e-7])
def test_either_side_of_a_tie_is_right(margin):
    args, kwargs = inputs(bias_of_i=1e-8)
    testing.check("mogrifier_lstm", args, kwargs, function=taking(margin))
    testing.check("mogrifier_lstm", args, kwargs)


@pytest.mark.parametrize("margin", [math.inf, -math.inf])
def test_the_wrong_gate_is_an_error_without_a_tie(margin):
    args, kwargs = inputs(bias_of_i=1e-3 if margin > 0 else -1e-3)
    with pytest.raises(AssertionError, match="budget"):
        testing.check("mogrifier_lstm", args, kwargs, function=taking(margin))
    testing.check("mogrifier_lstm", args, kwargs)


@pytest.mark.parametrize("bias_of_i", [0.0, 1e-3])
def test_nothing_more_is_allowed_where_the_gates_differ_or_are_equal(bias_of_i):
    args, kwargs = testing.convert(inputs(bias_of_i), dtype=torch.float64)
    run = lambda: testing.run(reference.mogrifier_lstm, args, kwargs)  # noqa: E731
    results, gradients = ties.spread(run, torch.float32)
    assert not any(t.any() for t in results + gradients)
