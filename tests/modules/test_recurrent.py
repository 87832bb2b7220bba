"""Properties of the recurrent operators, and equality with torch.nn.LSTM and torch.nn.LSTMCell.

Each comparison has three results: that of one computation (`got`), that of an equivalent one in the
same dtype (`plain`), and that of the latter in fp64 (`exact`). The error budget is that of
`fusedseq.testing`.
"""

import pytest
import torch
from fusedseq import fused, reference
from fusedseq.reference.dropout_mask import WEIGHT
from fusedseq.reference.weight_drop import drop_weight
from fusedseq.testing import (
    assert_within_budget,
    convert,
    cotangents,
    differentiable,
    lstm_case,
    mogrifier_lstm_case,
    names,
    roundings,
    run,
)

T, B, X, H = 7, 4, 6, 5
LSTM = lstm_case(T, B, X, H)
MOGRIFIER = mogrifier_lstm_case(T, B, X, H, 5, rank=3)
CAPPED = mogrifier_lstm_case(T, B, X, H, 4, cap_input_gate=True, state_dropout=0.4, seed=5)
EVALUATED = mogrifier_lstm_case(T, B, X, H, 3, zoneout_h=0.3, zoneout_c=0.6, training=False)
# Without CAPPED, whose state mask depends on the position of a sequence in the batch.
ROWWISE = pytest.mark.parametrize("case", [LSTM, MOGRIFIER, EVALUATED], ids=str)
ALL = pytest.mark.parametrize("case", [LSTM, MOGRIFIER, CAPPED, EVALUATED], ids=str)


def assert_equivalent(case, this, other, device, dtype, needs=None):
    """Compares results and gradients of this(op, args, kwargs) and other(op, args, kwargs)."""
    args, kwargs = case.inputs(device, dtype)
    got, got_grads = run(lambda *a, **k: this(getattr(fused, case.op), a, k), args, kwargs, needs)
    computations = []
    for wide in (torch.float32 if dtype == torch.float64 else dtype, torch.float64):
        wide_args, wide_kwargs = convert((args, kwargs), dtype=wide)
        computations.append(
            run(
                lambda *a, **k: other(getattr(fused, case.op), a, k),
                wide_args,
                wide_kwargs,
                needs,
                grad_outputs=cotangents(got),
            )
        )
    (plain, plain_grads), (exact, exact_grads) = computations
    wrt = names(case.op, args, kwargs)
    labels = [f"result {i}" for i in range(len(got))] + [
        f"gradient of {wrt[i]}" for i in needs or range(len(got_grads))
    ]
    terms = roundings(case.op, args, differentiable(args, kwargs))
    for each in zip(labels, got + got_grads, plain + plain_grads, exact + exact_grads, strict=True):
        assert_within_budget(*each, dtype, terms)


def whole(op, args, kwargs):
    return op(*args, **kwargs)


@ALL
@pytest.mark.parametrize("cut", [1, 3, T - 1])
def test_two_segments_equal_one(case, cut, device, dtype):
    """The state, and its gradient in backward, are carried from one segment to the other.

    Zoneout in training and input dropout draw a mask for each step and are off here.
    """

    def segments(op, args, kwargs):
        x, W_ih, W_hh, b, h0, c0, *rest = args
        y1, (h, c) = op(x[:cut], W_ih, W_hh, b, h0, c0, *rest, **kwargs)
        y2, last = op(x[cut:], W_ih, W_hh, b, h, c, *rest, **kwargs)
        return torch.cat([y1, y2]), last

    # In bf16 the carried state is rounded between the segments: then the budget must be that of the
    # segments.
    if dtype == torch.bfloat16:
        assert_equivalent(case, segments, whole, device, dtype)
    else:
        assert_equivalent(case, whole, segments, device, dtype)


@ROWWISE
def test_a_sequence_alone_equals_the_sequence_in_its_batch(case, device, dtype):
    def rows(op, args, kwargs):
        x, W_ih, W_hh, b, h0, c0, *rest = args
        runs = [
            op(x[:, i : i + 1], W_ih, W_hh, b, h0[i : i + 1], c0[i : i + 1], *rest, **kwargs)
            for i in range(B)
        ]
        y, states = zip(*runs, strict=True)
        h, c = zip(*states, strict=True)
        return torch.cat(y, 1), (torch.cat(h), torch.cat(c))

    assert_equivalent(case, whole, rows, device, dtype)


@ALL
def test_future_does_not_matter(case, device, dtype):
    args, kwargs = case.inputs(device, dtype)
    op = getattr(fused, case.op)
    y, _ = op(*args, **kwargs)
    changed = args[0].clone()
    changed[4:] = 1e4
    y_changed, _ = op(changed, *args[1:], **kwargs)
    assert torch.equal(y[:4], y_changed[:4])
    assert not torch.equal(y[4:], y_changed[4:])


@ALL
def test_final_state_is_the_last_output(case, device, dtype):
    args, kwargs = case.inputs(device, dtype)
    y, (h, _) = getattr(fused, case.op)(*args, **kwargs)
    assert torch.equal(y[-1], h)


def test_zero_rounds_is_an_lstm(device, dtype):
    def mogrifier(op, args, kwargs):
        return fused.mogrifier_lstm(*args, None, None, rounds=0)

    assert_equivalent(LSTM, mogrifier, whole, device, dtype)


def test_rounds_of_zero_weights_are_the_identity(device):
    """Because 2 sigmoid(0) = 1."""
    args, kwargs = LSTM.inputs(device)
    Q, R = torch.zeros(1, X, H, device=device), torch.zeros(1, H, X, device=device)
    y, (h, c) = fused.mogrifier_lstm(*args, Q, R, rounds=5)
    expected, (h_lstm, c_lstm) = fused.lstm(*args, **kwargs)
    torch.testing.assert_close((y, h, c), (expected, h_lstm, c_lstm))


@pytest.mark.parametrize("lengths", [[7, 7, 7, 7], [0, 0, 0, 0], [3, 0, 7, 1]], ids=str)
@pytest.mark.parametrize("case", [LSTM, MOGRIFIER, EVALUATED], ids=str)
def test_lengths_equal_each_sequence_alone(case, lengths, device, dtype):
    def masked(op, args, kwargs):
        return op(*args, **kwargs, lengths=torch.tensor(lengths, device=device))

    def alone(op, args, kwargs):
        x, W_ih, W_hh, b, h0, c0, *rest = args
        y, h, c = [], [], []
        for i, n in enumerate(lengths):
            y_i, h_i, c_i = x[:0, i : i + 1, :1].expand(0, 1, H), h0[i : i + 1], c0[i : i + 1]
            if n:
                y_i, (h_i, c_i) = op(x[:n, i : i + 1], W_ih, W_hh, b, h_i, c_i, *rest, **kwargs)
            y.append(torch.cat([y_i, y_i.new_zeros(T - n, 1, H)]))
            h.append(h_i)
            c.append(c_i)
        # Zero times a weight: a batch of empty sequences leaves the weights out of the graph.
        return torch.cat(y, 1) + 0 * W_ih.sum(), (torch.cat(h), torch.cat(c))

    assert_equivalent(case, masked, alone, device, dtype)


@pytest.mark.parametrize("case", [LSTM, MOGRIFIER], ids=str)
def test_padding_does_not_matter(case, device, dtype):
    """No result and no gradient depends on finite padding, and its own gradient is zero."""
    (x, *rest), kwargs = case.inputs(device, dtype)
    kwargs["lengths"] = torch.tensor([3, 0, 7, 1], device=device)
    past = torch.arange(T, device=device)[:, None] >= kwargs["lengths"]
    found = []
    for padding in (0.0, max(-1e30, torch.finfo(dtype).min)):
        results, grads = run(
            getattr(fused, case.op), (x.masked_fill(past[..., None], padding), *rest), kwargs
        )
        assert not results[0][past].any()
        assert not grads[0][past].any()
        found.append(results + grads)
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def test_lstm_equals_torch(device, dtype):
    def torch_lstm(op, args, kwargs):
        x, W_ih, W_hh, b, h0, c0 = args
        # The functional form takes weights as arguments, so that they get gradients. torch has two
        # biases, whose sum is b.
        y, h, c = torch.lstm(
            x,
            (h0[None], c0[None]),
            (W_ih, W_hh, b, torch.zeros_like(b)),
            True,
            1,
            0.0,
            False,
            False,
            False,
        )
        return y, (h[0], c[0])

    assert_equivalent(LSTM, whole, torch_lstm, device, dtype)


@pytest.mark.parametrize("rounds", range(6))
def test_mogrifier_equals_a_loop_over_lstm_cell(rounds, device, dtype):
    """The paper's equations around torch's own cell, without options that the cell lacks."""
    case = mogrifier_lstm_case(T, B, X, H, rounds)

    def loop(op, args, kwargs):
        x, W_ih, W_hh, b, h, c, Q, R, Q_bias, R_bias = args
        y = []
        for x_t in x:
            h_t = h
            for i in range(
                1, rounds + 1
            ):  # the paper counts from 1: x in odd rounds, h in even ones
                k = (i - 1) // 2
                if i % 2 == 1:
                    x_t = 2 * torch.sigmoid(torch.nn.functional.linear(h_t, Q[k], Q_bias[k])) * x_t
                else:
                    h_t = 2 * torch.sigmoid(torch.nn.functional.linear(x_t, R[k], R_bias[k])) * h_t
            h, c = torch.lstm_cell(x_t, (h_t, c), W_ih, W_hh, b, torch.zeros_like(b))
            y.append(h)
        return torch.stack(y), (h, c)

    assert_equivalent(case, whole, loop, device, dtype)


def test_low_rank_is_the_product_of_its_factors(device, dtype):
    def full(op, args, kwargs):
        *first, Q, R, Q_bias, R_bias = args
        return op(*first, Q[0] @ Q[1], R[0] @ R[1], Q_bias, R_bias, **kwargs)

    # The product rounded to bf16 is a different weight: the budget must be that of the product.
    if dtype == torch.bfloat16:
        assert_equivalent(MOGRIFIER, whole, full, device, dtype)
    else:
        assert_equivalent(MOGRIFIER, full, whole, device, dtype)


def test_shared_rounds_equal_repeated_weights(device, dtype):
    case = mogrifier_lstm_case(T, B, X, H, 5, shared=True)

    def repeated(op, args, kwargs):
        *first, Q, R, Q_bias, R_bias = args
        repeats = zip((Q, R, Q_bias, R_bias), (3, 2, 3, 2), strict=True)
        return op(*first, *(w.expand(n, *w.shape[1:]) for w, n in repeats), **kwargs)

    assert_equivalent(case, whole, repeated, device, dtype)


def test_zoneout_of_1_retains_the_initial_state(device, dtype):
    case = mogrifier_lstm_case(T, B, X, H, zoneout_h=1.0, zoneout_c=1.0)
    args, kwargs = case.inputs(device, dtype)
    y, (h, c) = fused.mogrifier_lstm(*args, **kwargs)
    assert torch.equal(h, args[4])
    assert torch.equal(c, args[5])
    assert torch.equal(y, args[4].expand_as(y))


DROPPED = pytest.mark.parametrize("case", [LSTM, MOGRIFIER, CAPPED], ids=str)


@DROPPED
@pytest.mark.parametrize("variational", [False, True])
@pytest.mark.parametrize("p", [0.3, 1.0])
@pytest.mark.parametrize("ops", [fused, reference], ids=["fused", "reference"])
def test_weight_drop_of_a_recurrence_equals_weight_drop_before_it(
    case, variational, p, ops, device, dtype
):
    """Bit for bit, with the gradient of W_hh itself, which is not written."""
    args, kwargs = case.inputs(device, dtype)
    op, W_hh = getattr(ops, case.op), args[2].clone()

    def before(x, W_ih, W_hh, *rest, **options):
        return op(x, W_ih, drop_weight(WEIGHT, W_hh, p, 5, variational), *rest, **options)

    kwargs = {**kwargs, "seed": 5}
    (y, g), (expected, expected_grads) = (
        run(f, args, kwargs | more)
        for f, more in ((op, {"weight_drop": p, "variational": variational}), (before, {}))
    )
    assert all(torch.equal(a, b) for a, b in zip(y + g, expected + expected_grads, strict=True))
    assert torch.equal(args[2], W_hh)
    dW_hh = g[2]
    assert dW_hh.any() == (p < 1)
    assert (dW_hh == 0).all(1).any() if variational else (dW_hh == 0).any()


@DROPPED
def test_weight_drop_of_0_and_in_eval_mode_changes_nothing(case, device, dtype):
    args, kwargs = case.inputs(device, dtype)
    op = getattr(fused, case.op)
    evaluated = kwargs | {"training": False}
    pairs = [(kwargs, kwargs | {"weight_drop": 0.0}), (evaluated, evaluated | {"weight_drop": 0.5})]
    for options, dropped in pairs:
        (y, g), (expected, expected_grads) = run(op, args, dropped), run(op, args, options)
        assert all(torch.equal(a, b) for a, b in zip(y + g, expected + expected_grads, strict=True))


def test_weight_drop_of_1_gives_no_nan(device, dtype):
    """A dropped weight is 0, not 0 times the weight, whatever its value is."""
    args, _ = LSTM.inputs(device, dtype)
    results, grads = run(fused.lstm, (*args[:2], 1e30 * args[2], *args[3:]), {"weight_drop": 1.0})
    expected, _ = run(fused.lstm, (*args[:2], 0 * args[2], *args[3:]), {})
    assert all(torch.equal(a, b) for a, b in zip(results, expected, strict=True))
    assert all(t.isfinite().all() for t in grads)


def test_saturated_gates_give_no_nan(device, dtype):
    args, kwargs = lstm_case(5, 3, 4, 4, scale=1e4).inputs(device, dtype)
    results, grads = run(fused.lstm, args, kwargs)
    assert all(t.isfinite().all() for t in results + grads)


def test_nan_stays_in_its_sequence(device):
    args, kwargs = LSTM.inputs(device)
    args[0][2, 1] = torch.nan
    y, _ = fused.lstm(*args, **kwargs)
    assert y[2:, 1].isnan().all()
    assert y[:2].isfinite().all()
    assert y[:, [0, 2, 3]].isfinite().all()
