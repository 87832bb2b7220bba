"""Argument checks of the options of `fused.<op>`: probabilities and other numbers, flags, sizes,
and the names of activations. Every message is of the form that test_errors.py describes.
"""

import re

import numpy
import pytest
import torch
from fusedseq import fused
from fusedseq.testing import CASES

from tests.support.good_calls import call

ONE_FLOAT = ("dropout", "locked_dropout", "weight_drop", "embedding")
PROBABILITIES = [
    *((op, "p") for op in (*ONE_FLOAT, "bias_activation_dropout", "residual_layer_norm")),
    *(("lstm", name) for name in ("zoneout_h", "zoneout_c", "weight_drop")),
    ("bidirectional_lstm", "weight_drop"),
    *(("projected_lstm", name) for name in ("zoneout_c", "weight_drop")),
    *(
        ("mogrifier_lstm", name)
        for name in ("input_dropout", "state_dropout", "zoneout_h", "zoneout_c", "weight_drop")
    ),
    ("linear_cross_entropy", "label_smoothing"),
    ("attention", "dropout"),
]


TRAINED = "lstm", "mogrifier_lstm", "projected_lstm"


@pytest.mark.parametrize(
    ("good", "name"), PROBABILITIES, ids=[f"{c}-{n}" for c, n in PROBABILITIES]
)
@pytest.mark.parametrize("p", [-0.1, 1.0000001, 2, float("nan"), float("inf")], ids=str)
@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
def test_probability(good, name, p, training):
    options = {"training": training} if good in TRAINED else {}
    with pytest.raises(ValueError, match=rf"^{good}: {name} must be in \[0, 1\], got {p}"):
        call(good, **{name: p}, **options)


NUMBERS = [
    *PROBABILITIES,
    ("residual_layer_norm", "eps"),
    ("activation_regularization", "alpha"),
    ("activation_regularization", "beta"),
    ("attention", "softcap"),
]


@pytest.mark.parametrize(("good", "name"), NUMBERS, ids=[f"{c}-{n}" for c, n in NUMBERS])
@pytest.mark.parametrize("value", [None, "a", True, [0.5], torch.tensor(0.5)], ids=str)
def test_not_a_number(good, name, value):
    got = type(value).__name__
    with pytest.raises(TypeError, match=rf"^{good}: {name} must be a number, got {got}$"):
        call(good, **{name: value})


def test_numbers_of_numpy_are_numbers():
    call("dropout", p=numpy.float32(0.5))
    call("residual_layer_norm", p=numpy.float64(0.5), eps=numpy.float32(1e-5))


FLAGS = [
    *(
        (op, "variational")
        for op in ("weight_drop", "lstm", "bidirectional_lstm", "projected_lstm", "mogrifier_lstm")
    ),
    *((op, "training") for op in ("bidirectional_lstm", *TRAINED)),
    *((op, "reverse") for op in TRAINED),
    ("mogrifier_lstm", "cap_input_gate"),
    ("mogrifier_lstm", "locked_input"),
    ("residual_layer_norm", "prenorm"),
    ("embedding", "sparse"),
    ("attention", "causal"),
    ("attention", "rope_interleaved"),
]


@pytest.mark.parametrize(("good", "name"), FLAGS, ids=[f"{c}-{n}" for c, n in FLAGS])
@pytest.mark.parametrize("value", [None, "a", 0, 1, float("nan")], ids=str)
def test_not_a_flag(good, name, value):
    with pytest.raises(TypeError, match=rf"^{good}: {name} must be True or False, got {value!r}$"):
        call(good, **{name: value})


@pytest.mark.parametrize("op", ["gru", "rnn", "layer_norm_gru", "layer_norm_lstm", "peephole_lstm"])
@pytest.mark.parametrize("name", ["reverse", "variational", "training"])
def test_not_a_flag_of_other_recurrences(op, name):
    args, kwargs = next(case for case in CASES if case.op == op).inputs()
    with pytest.raises(TypeError, match=rf"^{op}: {name} must be True or False, got 'a'$"):
        getattr(fused, op)(*args, **{**kwargs, name: "a"})


def test_a_flag_of_a_call_without_options():
    """Where the fast path would take the call."""
    q = torch.zeros(1, 2, 3, 4)
    with pytest.raises(TypeError, match=r"^attention: rope_interleaved must be True or False, got"):
        fused.attention(q, q, q, rope_interleaved="a")
    with pytest.raises(TypeError, match=r"^weight_drop: variational must be True or False, got"):
        fused.weight_drop(torch.zeros(2, 3), 0.0, 1, None)
    with pytest.raises(TypeError, match=r"^embedding: sparse must be True or False, got None"):
        fused.embedding(torch.zeros(2, dtype=torch.int64), torch.zeros(2, 3), sparse=None)


@pytest.mark.parametrize(
    ("shape", "wanted"),
    [
        (None, "a tuple or list of sizes, got None"),
        ("a", "a tuple or list of sizes, got 'a'"),
        (3, "a tuple or list of sizes, got 3"),
        ((2, 1.5), "a whole number, got float"),
        ((2, None), "a whole number, got NoneType"),
    ],
    ids=str,
)
def test_sizes_of_a_mask_that_are_not_whole_numbers(shape, wanted):
    with pytest.raises(TypeError, match=f"^dropout_mask: shape must be {wanted}$"):
        fused.dropout_mask(1, 0.5, shape)


@pytest.mark.parametrize("p", [-0.1, 1.5, float("nan")], ids=str)
def test_probability_of_a_mask(p):
    with pytest.raises(ValueError, match=rf"^dropout_mask: p must be in \[0, 1\], got {p}"):
        fused.dropout_mask(0, p, (3, 4))


@pytest.mark.parametrize("shape", [(-1,), (3, -4), (0, -1), (-(2**63),)])
def test_negative_size_of_a_mask(shape):
    got = re.escape(str(shape))
    with pytest.raises(
        ValueError, match=rf"^dropout_mask: shape must be sizes of at least 0, got {got}"
    ):
        fused.dropout_mask(0, 0.5, shape)


@pytest.mark.parametrize("activation", ["swish", "", None, 3])
def test_unknown_activation(activation):
    with pytest.raises(
        ValueError, match=r"^bias_activation_dropout: activation must be one of relu, gelu, .*, got"
    ):
        call("bias_activation_dropout", activation=activation)


@pytest.mark.parametrize("eps", [-1e-5, float("nan")])
def test_wrong_eps(eps):
    with pytest.raises(
        ValueError, match=rf"^residual_layer_norm: eps must be at least 0, got {eps}"
    ):
        call("residual_layer_norm", eps=eps)
