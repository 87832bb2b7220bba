"""The benchmark cases, and the baselines, which agree with the oracles."""

import inspect
from functools import partial

import pytest
import torch
from fusedseq import reference, testing

from bench.suite import baselines, compiled
from bench.suite.case_list import CASES
from bench.suite.cases import word_ids

# The cases without randomness and without options that the baselines do not implement.
DETERMINISTIC = [
    case
    for case in testing.CASES
    if case.op
    in (
        "activation_regularization",
        "attention",
        "gru",
        "linear_cross_entropy",
        "lstm",
        "mogrifier_lstm",
        "rnn",
        "split_cross_entropy",
    )
    or "-p0" in f"{case.id}-"
    or (case.op == "attention_varlen" and case.id.endswith("spare0"))
    if case.op != "dropout_mask" and "p0." not in case.id and 0 not in case.inputs()[0][0].shape
    if not any(word in case.id for word in ("lengths", "dropout", "sparse", "z_loss", "details"))
    if not any(word in case.id for word in ("softcap", "sinks", "starts", "reverse"))
    and ("zoneout" not in case.id or (case.op == "mogrifier_lstm" and "training0" in case.id))
]
IDS = torch.arange(60_000).expand(2, -1)


# Their baselines take the arguments of their benchmark cases alone.
FOR_CASES_ONLY = {"attention_varlen", "gru", "layer_norm_gru", "layer_norm_lstm", "peephole_lstm"}
FOR_CASES_ONLY |= {"bidirectional_lstm", "projected_lstm", "rnn"}


def test_every_operator_has_baselines_of_its_signature_and_cases():
    assert all(any(c.op == op for c in CASES) for op in FOR_CASES_ONLY)
    for op in set(reference.__all__) - {"dropout_mask"} - FOR_CASES_ONLY:
        oracle, *ours = (
            inspect.signature(getattr(module, op)).parameters
            for module in (reference, baselines, compiled)
        )
        assert all(list(oracle) == list(parameters) for parameters in ours), op
        assert any(case.op == op for case in CASES), op


@pytest.mark.parametrize(
    "case",
    [
        c
        for c in DETERMINISTIC
        if c.op == "attention" and not {"mask", "blind"} & {*c.id.split("-")}
    ],
    ids=str,
)
def test_attention_formula_agrees_with_torch(case):
    """Only where every query sees at least one key: without any the formula is NaN."""
    args, kwargs = case.inputs(dtype=torch.float64)
    expected = baselines.attention(*args, **kwargs)
    some_query_sees_no_key = (
        (case.id.endswith("causal1") and args[0].size(2) > args[1].size(2))
        or "offset-2" in case.id
        or case.id.endswith("offset12")
    )
    if not some_query_sees_no_key:
        torch.testing.assert_close(baselines.attention_eager(*args, **kwargs), expected)


@pytest.mark.parametrize("words", [("softcap",), ("sinks",), ("sinks", "softcap")], ids=str)
def test_the_attention_formula_has_softcap_and_sinks(words):
    options = {"softcap": 3.0} if "softcap" in words else {}
    tensors = ("sinks",) if "sinks" in words else ()
    case = testing.attention_case(2, 3, 7, 7, 4, *tensors, causal=True, **options)
    args, kwargs = case.inputs(dtype=torch.float64)
    expected = reference.attention(*args, **kwargs)
    torch.testing.assert_close(baselines.attention_eager(*args, **kwargs), expected)


def test_the_eager_lstm_starts_sequences_inside_of_a_row():
    case = testing.lstm_case(5, 4, 6, 5, starts=[(0, 1), (2, 0), (3, 0), (4, 3)])
    args, kwargs = case.inputs(dtype=torch.float64)
    expected = reference.lstm(*args, **kwargs)
    torch.testing.assert_close(baselines.lstm_loop(*args, **kwargs), expected)


@pytest.mark.parametrize("op", ["rnn", "bidirectional_lstm", "projected_lstm"])
def test_an_eager_loop_agrees_with_the_oracle(op):
    case = {
        "rnn": testing.hidden_state_case("rnn", 3, 2, 5, 4),
        "bidirectional_lstm": testing.bidirectional_lstm_case(3, 2, 5, 4),
        "projected_lstm": testing.projected_lstm_case(3, 2, 5, 4),
    }[op]
    args, _ = case.inputs(dtype=torch.float64)
    for loop in (getattr(baselines, f"{op}_loop"), getattr(baselines, op)):
        torch.testing.assert_close(loop(*args), getattr(reference, op)(*args))


@pytest.mark.parametrize("case", DETERMINISTIC, ids=str)
def test_baseline_agrees_with_the_oracle(case):
    args, kwargs = case.inputs(dtype=torch.float64)
    for ours, oracle in zip(
        *(testing.run(getattr(ops, case.op), args, kwargs) for ops in (baselines, reference)),
        strict=True,
    ):
        torch.testing.assert_close(ours, oracle)


@pytest.mark.parametrize("bias", [True, False])
def test_lstm_loop_agrees_with_the_oracle(bias):
    args, kwargs = testing.lstm_case(5, 3, 7, 4, bias=bias).inputs(dtype=torch.float64)
    for ours, oracle in zip(
        *(testing.run(f, args, kwargs) for f in (baselines.lstm_loop, reference.lstm)), strict=True
    ):
        torch.testing.assert_close(ours, oracle)


@pytest.mark.parametrize("op", ["layer_norm_gru", "layer_norm_lstm", "peephole_lstm"])
@pytest.mark.parametrize("bias", [True, False])
def test_loops_of_cells_with_vectors_agree_with_the_oracle(op, bias):
    make = testing.hidden_state_case if "gru" in op else testing.lstm_with_vectors_case
    case = make(op, 5, 3, 7, 4, bias=bias)
    args, kwargs = case.inputs(dtype=torch.float64)
    for ours, oracle in zip(
        *(testing.run(getattr(ops, op), args, kwargs) for ops in (baselines, reference)),
        strict=True,
    ):
        torch.testing.assert_close(ours, oracle)


@pytest.mark.parametrize(
    ("baseline", "oracle", "x", "drawn"),
    [
        (baselines.dropout, reference.dropout, torch.ones(300, 200), 60_000),
        (baselines.locked_dropout, reference.locked_dropout, torch.ones(3, 300, 200), 60_000),
        (baselines.weight_drop, reference.weight_drop, torch.ones(300, 200), 60_000),
        (
            partial(baselines.weight_drop, variational=True),
            reference.weight_drop,
            torch.ones(60_000, 2),
            60_000,
        ),
        (
            partial(baselines.embedding, IDS),
            partial(reference.embedding, IDS),
            torch.ones(60_000, 3),
            60_000,
        ),
        (
            partial(baselines.embedding_rows, IDS),
            partial(reference.embedding, IDS),
            torch.ones(60_000, 3),
            60_000,
        ),
    ],
)
def test_baselines_have_the_oracles_distribution_of_masks(baseline, oracle, x, drawn):
    """The same two values, the same share of zeros, and a mask shared by all steps where it has to
    be.
    """
    torch.manual_seed(0)
    y = baseline(x, 0.1, None)
    assert torch.equal(y.unique(), oracle(x, 0.1, 5).unique())
    assert abs((y == 0).double().mean() - 0.1) < 6 * (0.1 * 0.9 / drawn) ** 0.5
    if y.dim() == 3:
        assert torch.equal(y[0], y[1])


def test_every_dropout_of_the_recurrence_has_an_effect():
    args, kwargs = testing.mogrifier_lstm_case(6, 50, 40, 40).inputs()
    without = baselines.mogrifier_lstm(*args, **kwargs)[0]
    for option in ("input_dropout", "state_dropout", "zoneout_h", "zoneout_c"):
        assert not torch.equal(
            without, baselines.mogrifier_lstm(*args, **kwargs, **{option: 0.5})[0]
        ), option
    _, (h, c) = baselines.mogrifier_lstm(*args, **kwargs, zoneout_h=1.0, zoneout_c=1.0)
    assert torch.equal(h, args[4])
    assert torch.equal(c, args[5])


def test_cases_have_unique_names_and_count_their_work():
    names = [case.name for case in CASES]
    assert len(set(names)) == len(names)
    assert all(
        case.flops if case.roofline == "gemm" else case.traffic and case.copied for case in CASES
    )
    square = next(case for case in CASES if case.name == "mogrifier_lstm-T70-B70-650-r5")
    # Five rounds and eight blocks of gates, each H x H.
    assert square.flops == 2 * 70 * 70 * 13 * 650**2


def test_word_ids_are_in_the_vocabulary_and_small_ones_are_frequent():
    ids = word_ids.words(torch.randn, 10_000, 1000)
    assert ids.min() >= 0
    assert ids.max() < 1000
    assert (ids < 10).sum() > (ids >= 500).sum()
