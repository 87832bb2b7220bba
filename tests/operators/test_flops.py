"""Formulas of torch.utils.flop_counter: those of the forward equal the count of the oracle."""

import pytest
import torch
from fusedseq import fused, reference
from fusedseq.fused import autograd, flops
from fusedseq.testing import CASES, run
from torch.utils.flop_counter import FlopCounterMode, flop_registry

flops.register()

pytestmark = pytest.mark.cpu
# Their oracles compute no other products than the operator.
EXACT = (
    "gru",
    "layer_norm_gru",
    "rnn",
    "layer_norm_lstm",
    "linear",
    "linear_cross_entropy",
    "lstm",
    "mogrifier_lstm",
    "mogrifier_lstm_pair",
    "peephole_lstm",
)


def count(function, case, needs):
    args, kwargs = case.inputs()
    with FlopCounterMode(display=False) as counter:
        run(function, args, kwargs, needs)
    return counter.get_total_flops()


def test_every_registered_operator_has_a_formula():
    assert not [op for op, o in autograd.overloads.items() if o.overloadpacket not in flop_registry]


@pytest.mark.parametrize("case", [c for c in CASES if c.op in EXACT], ids=str)
def test_the_forward_counts_the_products_of_the_oracle(case):
    assert count(getattr(fused, case.op), case, []) == count(getattr(reference, case.op), case, [])


def test_attention_counts_as_torchs():
    q, k, v = (torch.randn(2, 3, n, 8, requires_grad=True) for n in (5, 7, 7))

    def of(function):
        with FlopCounterMode(display=False) as counter:
            y = function(q, k, v)
        forward = counter.get_total_flops()
        with FlopCounterMode(display=False) as counter:
            y.sum().backward()
        return forward, counter.get_total_flops()

    forward = 4 * 2 * 3 * 5 * 7 * 8
    assert of(fused.attention) == (forward, 5 * forward // 2)


def test_a_backward_of_linear_and_lstm_has_two_products_for_each_of_the_forward():
    for op in ("linear", "lstm"):
        case = next(c for c in CASES if c.op == op)
        function = getattr(fused, op)
        assert count(function, case, None) == 3 * count(function, case, [])
