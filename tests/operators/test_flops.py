"""Formulas of torch.utils.flop_counter.

Those of the forward equal the count of the oracle, and those of the backward expressions written
here.
"""

import pytest
import torch
from fusedseq import fused, reference
from fusedseq.fused import flops
from fusedseq.testing import CASES, run
from torch.utils.flop_counter import FlopCounterMode, flop_registry

from tests.support import direct_calls

flops.register()

pytestmark = pytest.mark.cpu
# Their oracles compute no other products than the operator.
EXACT = (
    "bidirectional_lstm",
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
    "projected_lstm",
)


def count(function, case, needs):
    args, kwargs = case.inputs()
    with FlopCounterMode(display=False) as counter:
        run(function, args, kwargs, needs)
    return counter.get_total_flops()


def counted(function):
    """The result of function(), and the operations counted in it."""
    with FlopCounterMode(display=False) as counter:
        result = function()
    return result, counter.get_total_flops()


def test_every_registered_operator_has_a_formula():
    operators = direct_calls.registered()
    assert {"lstm", "attention_plan", "nt_asgd_norm"} <= operators
    without = {op for op in operators if getattr(torch.ops.fusedseq, op) not in flop_registry}
    assert without == set()


def test_the_operators_with_a_product_count_operations_and_no_others():
    """In a call of each registered operator that has a kernel for the CPU."""
    without_products = {
        "activation_regularization",
        "activation_regularization_backward",
        "attention_plan",
        "bias_activation_dropout",
        "bias_activation_dropout_backward",
        "dropout",
        "dropout_mask",
        "embedding",
        "embedding_backward",
        "linear_cross_entropy_scale",
        "locked_dropout",
        "nt_asgd_norm",
        "nt_asgd_step_",
        "residual_layer_norm",
        "residual_layer_norm_backward",
        "weight_drop",
    }
    found = {}
    for op, call in list(direct_calls.calls()):
        operator = getattr(torch.ops.fusedseq, op)
        _, operations = counted(lambda operator=operator, call=call: operator(**call))
        found.setdefault(op, set()).add(operations > 0)
    assert {*found} == direct_calls.registered() - direct_calls.ON_CUDA_ALONE
    assert found == {op: {op not in without_products} for op in found}


def test_a_repeated_product_counts_each_time():
    x, W = torch.randn(3, 5), torch.randn(4, 5)
    _, once = counted(lambda: torch.ops.fusedseq.gemm_rate(x, W, 1))
    _, often = counted(lambda: torch.ops.fusedseq.gemm_rate(x, W, 7))
    assert (once, often) == (2 * 3 * 4 * 5, 7 * once)


@pytest.mark.parametrize("case", [c for c in CASES if c.op in EXACT], ids=str)
def test_the_forward_counts_the_products_of_the_oracle(case):
    assert count(getattr(fused, case.op), case, []) == count(getattr(reference, case.op), case, [])


def forward_and_backward(function):
    """The operations of function(), whose result is a tensor, and of its backward."""
    y, forward = counted(function)
    _, backward = counted(lambda: y.sum().backward())
    return forward, backward


def test_attention_counts_as_torchs():
    q, k, v = (torch.randn(2, 3, n, 8, requires_grad=True) for n in (5, 7, 7))

    forward = 4 * 2 * 3 * 5 * 7 * 8
    wanted = forward, 5 * forward // 2
    assert forward_and_backward(lambda: fused.attention(q, k, v)) == wanted


def with_gradients(*shapes):
    return [torch.randn(*shape, requires_grad=True) for shape in shapes]


def test_a_backward_of_linear_has_two_products_for_the_one_of_the_forward():
    M, N, K = 3, 4, 5
    x, W = with_gradients((M, K), (N, K))
    of_dx, of_dW = 2 * M * N * K, 2 * M * N * K
    assert forward_and_backward(lambda: fused.linear(x, W)) == (2 * M * N * K, of_dx + of_dW)


@pytest.mark.parametrize(("op", "gates"), [("lstm", 4), ("gru", 3), ("rnn", 1)])
def test_a_backward_of_a_recurrence_has_the_products_of_four_gradients(op, gates):
    """Those of x and W_ih from the gates' gradients, and those of h and W_hh."""
    T, B, X, H = 3, 2, 5, 4
    x, W_ih, W_hh, h0 = with_gradients((T, B, X), (gates * H, X), (gates * H, H), (B, H))
    bias = torch.randn({"gru": 4}.get(op, gates) * H)  # gru's has a part for h alone
    states = (h0, torch.randn(B, H)) if op == "lstm" else (h0,)
    of_dx, of_dW_ih = 2 * T * B * gates * H * X, 2 * T * B * gates * H * X
    of_dh, of_dW_hh = 2 * T * B * gates * H * H, 2 * T * B * gates * H * H
    found = forward_and_backward(lambda: getattr(fused, op)(x, W_ih, W_hh, bias, *states)[0])
    assert found == (of_dx + of_dh, of_dx + of_dW_ih + of_dh + of_dW_hh)


@pytest.mark.parametrize("rank", [None, 3])
def test_a_backward_of_a_mogrifier_lstm_has_two_products_for_each_of_every_round(rank):
    """Five rounds: three on x by Q, and two on h by R."""
    T, B, X, H = 3, 2, 5, 4
    x, W_ih, W_hh, h0, c0 = with_gradients((T, B, X), (4 * H, X), (4 * H, H), (B, H), (B, H))
    if rank is None:
        Q, R = with_gradients((3, X, H), (2, H, X))
        of_rounds = 3 * X * H + 2 * H * X
    else:
        factors = with_gradients((3, X, rank), (3, rank, H), (2, H, rank), (2, rank, X))
        Q, R = tuple(factors[:2]), tuple(factors[2:])
        of_rounds = 3 * (X * rank + rank * H) + 2 * (H * rank + rank * X)
    forward = 2 * T * B * (4 * H * (X + H) + of_rounds)
    found = forward_and_backward(
        lambda: fused.mogrifier_lstm(x, W_ih, W_hh, None, h0, c0, Q, R, rounds=5)[0]
    )
    assert found == (forward, 2 * forward)


def test_a_loss_counts_its_gradients_where_they_are_computed():
    """The gradients of x and W, in the forward if the loss is one number, and else in the backward,
    which computes the logits again."""
    N, E, V = 6, 5, 9
    x, W = with_gradients((N, E), (V, E))
    target, logits = torch.arange(N), 2 * N * E * V

    def loss(reduction):
        return lambda: fused.linear_cross_entropy(x, W, target, reduction=reduction)

    assert forward_and_backward(loss("mean")) == (3 * logits, 0)
    assert forward_and_backward(loss("none")) == (logits, 3 * logits)
    with torch.no_grad():
        assert counted(loss("mean"))[1] == logits
