"""Argument checks of the public functions `fused.<op>`.

Each test changes one argument of a good call and expects an exception whose message names the
operator, the argument, what it must be and what was given: `lstm: W_hh must be (4H, H) = (16, 4),
got (16, 3)`.
"""

import inspect
import re
from importlib import import_module

import pytest
import torch
from fusedseq import fused, reference
from fusedseq.testing import (
    activation_regularization_case,
    attention_case,
    bias_activation_dropout_case,
    convert,
    dropout_case,
    embedding_case,
    linear_case,
    linear_cross_entropy_case,
    lstm_case,
    mogrifier_lstm_case,
    mogrifier_lstm_pair_case,
    residual_layer_norm_case,
    split_cross_entropy_case,
)
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_map_only

T, B, X, H = 3, 2, 5, 4
GOOD = {
    "lstm": lstm_case(T, B, X, H, weight_drop=0.5),
    "mogrifier_lstm": mogrifier_lstm_case(T, B, X, H, 3),
    "mogrifier_lstm of low rank": mogrifier_lstm_case(T, B, X, H, 3, rank=2),
    "mogrifier_lstm_pair": mogrifier_lstm_pair_case(T, B, X, H, 6),
    "dropout": dropout_case("dropout", (3, 5), 0.5),
    "locked_dropout": dropout_case("locked_dropout", (3, 2, 5), 0.5),
    "weight_drop": dropout_case("weight_drop", (6, 5), 0.5),
    "embedding": embedding_case((3, 2), 7, 4, 0.5),
    "activation_regularization": activation_regularization_case(3, 2, 4),
    "attention": attention_case(
        2,
        2,
        4,
        5,
        6,
        "biasNLS",
        "mask",
        "lengths",
        "alibi",
        "relative2",
        "rope",
        dropout=0.5,
        scale=1.0,
    ),
    "bias_activation_dropout": bias_activation_dropout_case((3, 5), "gelu", 0.5),
    "linear": linear_case(3, 5, 4),
    "residual_layer_norm": residual_layer_norm_case((3, 5), p=0.5),
    "linear_cross_entropy": linear_cross_entropy_case(3, 5, 4, weighted=True),
    "split_cross_entropy": split_cross_entropy_case(3, 5, 4, (1, 2)),
}


def call(good, **changed):
    """Calls the operator of a good case with changed arguments.

    changed: {name: value}; a function is applied to the good argument
    """
    case = GOOD[good]
    args, kwargs = case.inputs()
    bound = inspect.signature(getattr(reference, case.op)).bind(*args, **kwargs)
    bound.apply_defaults()
    for name, value in changed.items():
        bound.arguments[name] = value(bound.arguments[name]) if inspect.isfunction(value) else value
    return getattr(fused, case.op)(*bound.args, **bound.kwargs)


@pytest.mark.parametrize("good", GOOD)
def test_good_input_passes(good):
    call(good)


SHAPES = [
    # case, argument, its wrong shape, the shape that the message requires
    ("linear", "x", (3, 4), r"\(\.\.\., K\) with W's K = 5"),
    ("linear", "W", (4, 5, 1), r"\(N, K\)"),
    ("linear", "b", (5,), r"\(N,\) = \(4,\)"),
    ("attention", "q", (2, 4, 6), r"\(B, N, L, D\)"),
    ("attention", "q", (2, 2, 4, 2049), r"\(B, N, L, D\) with D at most 2048"),
    ("attention", "k", (2, 5, 6), r"\(B, N_kv, S, D\)"),
    ("attention", "k", (2, 2, 5, 4), r"\(B, N_kv, S, D\) with D = 6"),
    ("attention", "k", (2, 3, 5, 6), r"N_kv that divides N = 2"),
    ("attention", "k", (2, 0, 5, 6), r"N_kv that divides N = 2"),
    ("attention", "v", (2, 2, 4, 6), r"\(B, N_kv, S, D\) = \(2, 2, 5, 6\)"),
    ("attention", "v", (2, 2, 5, 7), r"\(B, N_kv, S, D\) = \(2, 2, 5, 6\)"),
    ("attention", "bias", (2, 3, 4, 5), r"broadcastable to \(B, N, L, S\) = \(2, 2, 4, 5\)"),
    ("attention", "bias", (1, 2, 2, 4, 5), r"broadcastable to \(B, N, L, S\) = \(2, 2, 4, 5\)"),
    ("attention", "alibi", (3,), r"\(N,\) = \(2,\)"),
    ("attention", "alibi", (1, 2), r"\(N,\) = \(2,\)"),
    ("attention", "relative_keys", (5,), r"\(2K \+ 1, D\)"),
    ("attention", "relative_keys", (5, 4), r"\(2K \+ 1, D\) with D = 6"),
    ("attention", "relative_keys", (4, 6), r"odd number of rows"),
    ("attention", "rope", (9,), r"\(P, R\)"),
    ("attention", "rope", (4, 6), r"\(P, R\) with an even R from 2 to D = 6 and P at least 5"),
    ("attention", "rope", (9, 8), r"\(P, R\) with an even R from 2 to D = 6"),
    ("attention", "rope", (9, 3), r"\(P, R\) with an even R from 2 to D = 6"),
    ("attention", "rope", (9, 0), r"\(P, R\) with an even R from 2 to D = 6"),
    ("bias_activation_dropout", "x", (), r"\(\.\.\., D\)"),
    ("bias_activation_dropout", "b", (4,), r"\(D,\) = \(5,\)"),
    ("bias_activation_dropout", "b", (1, 5), r"\(D,\) = \(5,\)"),
    ("residual_layer_norm", "x", (), r"\(\.\.\., D\)"),
    ("residual_layer_norm", "residual", (5,), r"\(\.\.\., D\) = \(3, 5\)"),
    ("residual_layer_norm", "weight", (3,), r"\(D,\) = \(5,\)"),
    ("residual_layer_norm", "bias", (3, 5), r"\(D,\) = \(5,\)"),
    ("linear_cross_entropy", "x", (3, 4), r"\(\.\.\., E\) with W's E = 5"),
    ("linear_cross_entropy", "W", (4, 5, 1), r"\(V, E\)"),
    ("linear_cross_entropy", "W", (0, 5), r"\(V, E\), both at least 1"),
    ("linear_cross_entropy", "b", (5,), r"\(V,\) = \(4,\)"),
    ("linear_cross_entropy", "class_weights", (3,), r"\(V,\) = \(4,\)"),
    ("split_cross_entropy", "x", (3, 4), r"\(\.\.\., E\) with W's E = 5"),
    ("split_cross_entropy", "b", (5,), r"\(V,\) = \(4,\)"),
    ("split_cross_entropy", "tombstones", (3, 5), r"\(K, E\) = \(2, 5\)"),
    ("split_cross_entropy", "tombstone_bias", (3,), r"\(K,\) = \(2,\)"),
    ("lstm", "x", (2, 5), r"\(T, B, X\)"),
    ("lstm", "x", (0, 2, 5), r"T"),
    ("lstm", "x", (3, 2, 0), r"X"),
    ("lstm", "W_hh", (16, 3), r"\(4H, H\) = \(16, 4\)"),
    ("lstm", "W_hh", (15, 4), r"\(4H, H\) = \(16, 4\)"),
    ("lstm", "W_hh", (4, 16), r"\(4H, H\) = \(16, 4\)"),
    ("lstm", "W_ih", (16, 4), r"\(4H, X\) = \(16, 5\)"),
    ("lstm", "W_ih", (16,), r"\(4H, X\) = \(16, 5\)"),
    ("lstm", "b", (4,), r"\(4H,\) = \(16,\)"),
    ("lstm", "b", (1, 16), r"\(4H,\) = \(16,\)"),
    ("lstm", "h0", (1, 2, 4), r"\(B, H\)"),
    ("lstm", "h0", (3, 4), r"\(B, H\) = \(2, 4\)"),
    ("lstm", "h0", (1, 4), r"\(B, H\) = \(2, 4\)"),
    ("lstm", "c0", (2, 5), r"\(B, H\) = \(2, 4\)"),
    ("mogrifier_lstm", "x", (0, 2, 5), r"T"),
    ("mogrifier_lstm", "W_hh", (16, 3), r"\(4H, H\) = \(16, 4\)"),
    ("mogrifier_lstm", "c0", (1, 4), r"\(B, H\) = \(2, 4\)"),
    ("mogrifier_lstm", "Q", (2, 4, 5), r"\(n, X, H\) = \(2, 5, 4\)"),
    ("mogrifier_lstm", "Q", (5, 4), r"n = 2"),
    ("mogrifier_lstm", "Q", (3, 5, 4), r"n = 2"),
    ("mogrifier_lstm", "Q", (0, 5, 4), r"n = 2"),
    ("mogrifier_lstm", "R", (2, 4, 5), r"n = 1"),
    ("mogrifier_lstm", "R", (1, 5, 4), r"\(n, H, X\) = \(1, 4, 5\)"),
    ("mogrifier_lstm", "Q_bias", (2, 4), r"\(n, X\) = \(2, 5\)"),
    ("mogrifier_lstm", "Q_bias", (1, 5), r"\(n, X\) = \(2, 5\)"),
    ("mogrifier_lstm", "R_bias", (1, 5), r"\(n, H\) = \(1, 4\)"),
    ("locked_dropout", "x", (3, 5), r"\(T, B, D\)"),
    ("weight_drop", "W", (6,), r"\(rows, columns\)"),
    ("weight_drop", "W", (6, 5, 1), r"\(rows, columns\)"),
    ("embedding", "W", (7,), r"\(V, E\)"),
    ("embedding", "W", (7, 4, 1), r"\(V, E\)"),
    ("activation_regularization", "dropped", (3, 2), r"\(T, B, H\)"),
    ("activation_regularization", "raw", (2, 2, 4), r"\(T, B, H\) = \(3, 2, 4\)"),
]


@pytest.mark.parametrize(
    ("good", "name", "shape", "wanted"), SHAPES, ids=[f"{c}-{n}-{s}" for c, n, s, _ in SHAPES]
)
def test_wrong_shape(good, name, shape, wanted):
    got = r"\(" + ", ".join(map(str, shape)) + r",?\)"
    with pytest.raises(ValueError, match=rf"^{good}: .*{name} .*{wanted}.*, got .*{got}"):
        call(good, **{name: torch.zeros(shape)})


def test_a_sequence_without_steps():
    with pytest.raises(ValueError, match=r"activation_regularization: .*\(0, 2, 4\)"):
        call("activation_regularization", dropped=torch.zeros(0, 2, 4), raw=torch.zeros(0, 2, 4))


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


FLOATS = [
    *(("lstm", name) for name in ("x", "W_ih", "W_hh", "b", "h0", "c0")),
    *(
        ("mogrifier_lstm", name)
        for name in ("x", "W_ih", "W_hh", "b", "h0", "c0", "Q", "R", "Q_bias", "R_bias")
    ),
    ("dropout", "x"),
    ("locked_dropout", "x"),
    ("weight_drop", "W"),
    ("embedding", "W"),
    ("activation_regularization", "dropped"),
    ("activation_regularization", "raw"),
    *(("attention", name) for name in ("q", "k", "v", "bias", "relative_keys")),
    ("linear", "x"),
    ("linear", "W"),
    ("linear", "b"),
    ("bias_activation_dropout", "x"),
    ("bias_activation_dropout", "b"),
    *(("residual_layer_norm", name) for name in ("x", "residual", "weight", "bias")),
    *(("split_cross_entropy", name) for name in ("x", "W", "b", "tombstones", "tombstone_bias")),
    ("linear_cross_entropy", "x"),
    ("linear_cross_entropy", "W"),
    ("linear_cross_entropy", "b"),
]
FLOAT_IDS = [f"{c}-{n}" for c, n in FLOATS]


# attention and linear support fp16.
DTYPES = [
    (c, n, t)
    for c, n in FLOATS
    for t in (torch.int64, torch.float16, torch.complex64, torch.bool)
    if (c, n, t) not in (("attention", "q", torch.float16), ("linear", "x", torch.float16))
]


@pytest.mark.parametrize(
    ("good", "name", "other"), DTYPES, ids=[f"{c}-{n}-{t}" for c, n, t in DTYPES]
)
def test_wrong_dtype(good, name, other):
    with pytest.raises(TypeError, match=rf"^{good}: {name} .*, got {other}"):
        call(good, **{name: lambda t: t.to(other)})


TRITON = (
    "attention",
    "bias_activation_dropout",
    "linear_cross_entropy",
    "residual_layer_norm",
    "split_cross_entropy",
)


@pytest.mark.parametrize("good", TRITON)
def test_fp64_is_rejected_by_triton_kernels(good):
    case = GOOD[good]
    inputs = convert(case.inputs(), dtype=torch.float64)
    with FakeTensorMode():
        args, kwargs = tree_map_only(
            torch.Tensor, lambda t: torch.empty(t.shape, dtype=t.dtype, device="cuda"), inputs
        )
        dtypes = "float32 or bfloat16 or float16 on cuda"
        with pytest.raises(TypeError, match=rf"^{good}: [qx] must be {dtypes}, got torch.float64"):
            getattr(fused, case.op)(*args, **kwargs)


@pytest.mark.parametrize("good", ["dropout", "embedding", "activation_regularization"])
def test_dtypes_of_the_kernels_in_cuda(good):
    """CUDA kernels support fp16; a dtype that no kernel supports is rejected."""
    case = GOOD[good]
    for dtype in (torch.float16, torch.float8_e5m2):
        inputs = convert(case.inputs(), dtype=dtype)
        with FakeTensorMode():
            args, kwargs = tree_map_only(
                torch.Tensor, lambda t: torch.empty(t.shape, dtype=t.dtype, device="cuda"), inputs
            )
            if dtype == torch.float16:
                getattr(fused, case.op)(*args, **kwargs)
                continue
            with pytest.raises(
                TypeError,
                match=rf"^{good}: \w+ must be float32 or .* or float16 on cuda, got {dtype}",
            ):
                getattr(fused, case.op)(*args, **kwargs)


ONE_FLOAT = ("dropout", "locked_dropout", "weight_drop", "embedding")
MIXED = [(c, n) for c, n in FLOATS if c not in ONE_FLOAT]


@pytest.mark.parametrize(("good", "name"), MIXED, ids=[f"{c}-{n}" for c, n in MIXED])
@pytest.mark.parametrize("other", [torch.float64, torch.bfloat16], ids=str)
def test_mixed_dtypes(good, name, other):
    """The message names the argument that differs from the first; if the first does, the second."""
    with pytest.raises(TypeError, match=rf"^{good}: \w+ must be of the dtype of .*, got torch"):
        call(good, **{name: lambda t: t.to(other)})


MAY_BE_NONE = (
    "b",
    "tombstone_bias",
    "residual",
    "weight",
    "bias",
    "relative_keys",
    "Q",
    "R",
    "Q_bias",
    "R_bias",
)


@pytest.mark.parametrize(("good", "name"), FLOATS, ids=FLOAT_IDS)
def test_not_a_tensor(good, name):
    for value in (3, [1.0]) if name in MAY_BE_NONE else (3, [1.0], None):
        with pytest.raises(TypeError, match=rf"^{good}: {name} must be a tensor"):
            call(good, **{name: value})


@pytest.mark.parametrize(
    ("good", "name"),
    [
        *MIXED,
        ("embedding", "ids"),
        ("lstm", "lengths"),
        ("linear_cross_entropy", "target"),
        ("linear_cross_entropy", "class_weights"),
    ],
    ids=str,
)
def test_devices_differ(good, name):
    with pytest.raises(ValueError, match=rf"^{good}: .*device.*(meta|cpu)"):
        call(
            good,
            **{
                name: lambda t: (
                    torch.zeros(B, dtype=torch.int64, device="meta") if t is None else t.to("meta")
                )
            },
        )


PROBABILITIES = [
    *((op, "p") for op in (*ONE_FLOAT, "bias_activation_dropout", "residual_layer_norm")),
    ("lstm", "weight_drop"),
    *(
        ("mogrifier_lstm", name)
        for name in ("input_dropout", "state_dropout", "zoneout_h", "zoneout_c", "weight_drop")
    ),
    ("linear_cross_entropy", "label_smoothing"),
    ("attention", "dropout"),
]


@pytest.mark.parametrize(
    ("good", "name"), PROBABILITIES, ids=[f"{c}-{n}" for c, n in PROBABILITIES]
)
@pytest.mark.parametrize("p", [-0.1, 1.0000001, 2, float("nan"), float("inf")], ids=str)
@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
def test_probability(good, name, p, training):
    options = {"training": training} if good in ("lstm", "mogrifier_lstm") else {}
    with pytest.raises(ValueError, match=rf"^{good}: {name} must be in \[0, 1\], got {p}"):
        call(good, **{name: p}, **options)


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


@pytest.mark.parametrize("offset", [2**63 - 1, 2**62 + 1, -(2**62) - 1, 2**70])
def test_offset_whose_positions_exceed_64_bits(offset):
    with pytest.raises(
        ValueError, match=rf"^attention: offset must be in \[-2\*\*62, 2\*\*62\], got {offset}"
    ):
        call("attention", offset=offset, rope=None)


@pytest.mark.parametrize("B", [2**62 + 2**16, 2**48])
def test_a_batch_beyond_the_address_space(B):
    """A tensor that repeats one element may have any size, its result may not."""
    q = torch.zeros(1, 1, 1, 1).expand(B, 1, 1, 1)
    with pytest.raises(RuntimeError):
        fused.attention(q, q, q)


SEEDED = [
    "attention",
    "lstm",
    "mogrifier_lstm",
    *ONE_FLOAT,
    "bias_activation_dropout",
    "residual_layer_norm",
]


@pytest.mark.parametrize("good", SEEDED)
@pytest.mark.parametrize(
    "seed",
    [1.5, "1", None, torch.tensor(1.0), torch.tensor([1, 2]), torch.tensor(1, dtype=torch.int32)],
    ids=str,
)
def test_wrong_seed(good, seed):
    with pytest.raises(TypeError, match=rf"^{good}: seed must be .*, got"):
        call(good, seed=seed)


@pytest.mark.parametrize("good", SEEDED)
@pytest.mark.parametrize("seed", [-1, -(2**63), 2**63 - 1, 2**63, 2**64 - 1])
def test_any_64_bits_are_a_seed(good, seed):
    call(good, seed=seed)


@pytest.mark.parametrize("bad", [-1, 7, 2**40, -(2**63)])
@pytest.mark.parametrize("sparse", [False, True], ids=["dense", "sparse"])
@pytest.mark.parametrize("p", [0.0, 0.5])
def test_token_outside_the_vocabulary(bad, sparse, p):
    ids = torch.tensor([[0, 6], [3, bad]])
    with pytest.raises(
        IndexError, match=rf"^embedding: ids must be in \[0, V\) = \[0, 7\), got {bad}"
    ):
        call("embedding", ids=ids, sparse=sparse, p=p)


def test_token_of_an_empty_vocabulary():
    with pytest.raises(IndexError, match=r"^embedding: ids must be in \[0, V\) = \[0, 0\)"):
        call("embedding", W=torch.zeros(0, 4))


@pytest.mark.parametrize("other", [torch.int16, torch.float32, torch.bool], ids=str)
def test_ids_of_another_dtype(other):
    with pytest.raises(TypeError, match=rf"^embedding: ids must be int64 or int32, got {other}"):
        call("embedding", ids=torch.zeros(3, dtype=other))


@pytest.mark.parametrize("good", ["lstm", "mogrifier_lstm"])
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


@pytest.mark.parametrize("good", ["lstm", "mogrifier_lstm"])
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


@pytest.mark.parametrize("bad", [-1, 4, 2**40, -(2**63)])
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_target_outside_the_vocabulary(bad, reduction):
    target = torch.tensor([0, bad, -100])
    message = rf"target must be in \[0, V\) = \[0, 4\) or ignore_index = -100, got {bad}"
    with pytest.raises(IndexError, match=f"^linear_cross_entropy: {message}"):
        call("linear_cross_entropy", target=target, reduction=reduction)
    call(
        "linear_cross_entropy",
        target=target[:2],
        x=lambda x: x[:2],
        reduction=reduction,
        ignore_index=bad,
    )


@pytest.mark.parametrize(
    ("name", "value", "wanted"),
    [
        ("target", torch.zeros(4, dtype=torch.int64), r"\(\.\.\.,\) of x = \(3,\), got \(4,\)"),
        ("z_loss", -1.0, "at least 0, got -1"),
        ("z_loss", float("nan"), "at least 0, got nan"),
        ("temperature", 0.0, "above 0, got 0"),
        ("temperature", -2.0, "above 0, got -2"),
        ("reduction", "average", "one of none, mean, sum, got average"),
    ],
)
def test_wrong_option_of_the_loss(name, value, wanted):
    with pytest.raises(ValueError, match=rf"^linear_cross_entropy: {name} must be {wanted}"):
        call("linear_cross_entropy", **{name: value})


@pytest.mark.parametrize("splits", [(0, 2), (2, 2), (3, 2), (2, 4), (-1,), (5,)])
def test_splits_that_do_not_ascend(splits):
    with pytest.raises(
        ValueError, match=r"^split_cross_entropy: splits must ascend in \(0, V\) = \(0, 4\), got"
    ):
        call("split_cross_entropy", splits=splits)


def test_splits_that_are_not_numbers():
    with pytest.raises(
        TypeError, match=r"^split_cross_entropy: splits must be whole numbers, got \(1.5,\)"
    ):
        call("split_cross_entropy", splits=(1.5,))


@pytest.mark.parametrize("name", ["target", "class_weights"])
def test_wrong_dtype_in_the_loss(name):
    with pytest.raises(
        TypeError, match=rf"^linear_cross_entropy: {name} must be .*, got torch.float16"
    ):
        call("linear_cross_entropy", **{name: lambda t: t.half()})


@pytest.mark.parametrize("name", ["alibi", "rope", "mask", "key_lengths", "key_rows"])
def test_option_tensors_of_attention(name):
    with pytest.raises(
        ValueError, match=rf"^attention: {name} must be on .*the device of q, cpu, got meta"
    ):
        call("attention", **{name: torch.zeros(B, 5, dtype=torch.int64, device="meta")})
    with pytest.raises(TypeError, match=rf"^attention: {name} must be a tensor.*, got list"):
        call("attention", **{name: [1.5, 2.5]})


ATTENTION_OPTIONS = [
    # argument, value, the exception, its message
    (
        "alibi",
        torch.zeros(2).double(),
        TypeError,
        "float32 or of the dtype of q, torch.float32, got torch.float64",
    ),
    (
        "rope",
        torch.zeros(9, 6).half(),
        TypeError,
        "float32 or of the dtype of q, torch.float32, got torch.float16",
    ),
    (
        "mask",
        torch.zeros(4, 5),
        TypeError,
        "bool, True where a key is visible, got torch.float32; a float mask is a bias",
    ),
    (
        "mask",
        torch.ones(4, 4) > 0,
        ValueError,
        r"broadcastable to \(B, N, L, S\) = \(2, 2, 4, 5\), got \(4, 4\)",
    ),
    ("key_lengths", torch.tensor([3, 6]), ValueError, r"in \[0, S\] = \[0, 5\], got 6"),
    ("key_lengths", torch.tensor([-1, 3]), ValueError, r"in \[0, S\] = \[0, 5\], got -1"),
    ("key_lengths", torch.tensor([3]), ValueError, r"\(B,\) = \(2,\), got \(1,\)"),
    ("key_lengths", torch.tensor([3.0, 4.0]), TypeError, "int64 or int32, got torch.float32"),
    ("key_lengths", [3, 6], ValueError, r"in \[0, S\] = \[0, 5\], got 6"),
    ("key_lengths", (3, True), TypeError, r"a tensor or a list of ints, got tuple with \['bool'\]"),
    ("key_lengths", 3, TypeError, "a tensor or a list of ints, got int"),
    ("offset", 1.5, TypeError, "a whole number, got float"),
    ("offset", True, TypeError, "a whole number, got bool"),
    ("scale", "large", TypeError, "a number, got str"),
    ("scale", torch.tensor(1.0), TypeError, "a number, got Tensor"),
    ("causal", 1, TypeError, "True or False, got 1"),
    ("rope_interleaved", None, TypeError, "True or False, got None"),
    ("key_rows", torch.zeros(2, dtype=torch.int64), ValueError, r"\(B, S\), got \(2,\)"),
    (
        "key_rows",
        torch.zeros(3, 5, dtype=torch.int64),
        ValueError,
        r"\(B, S\) with B = 2 and S in \[1, 5\], got \(3, 5\)",
    ),
    (
        "key_rows",
        torch.zeros(2, 6, dtype=torch.int64),
        ValueError,
        r"\(B, S\) with B = 2 and S in \[1, 5\], got \(2, 6\)",
    ),
    ("key_rows", torch.full((2, 5), 2), ValueError, r"in \[0, 2\), the rows of k, got 2"),
    ("key_rows", torch.full((2, 5), -1), ValueError, r"in \[0, 2\), the rows of k, got -1"),
    ("key_rows", torch.zeros(2, 5), TypeError, "int64 or int32, got torch.float32"),
]


@pytest.mark.parametrize(
    ("name", "value", "error", "message"),
    ATTENTION_OPTIONS,
    ids=[f"{a[0]}-{a[3]}" for a in ATTENTION_OPTIONS],
)
def test_wrong_option_of_attention(name, value, error, message):
    with pytest.raises(error, match=rf"^attention: {name} must be {message}"):
        call("attention", **{name: value})


def test_negative_offset_of_attention():
    """Without rope, queries may have positions before that of the first key."""
    call("attention", offset=-1, rope=None)
    with pytest.raises(
        ValueError,
        match=r"^attention: rope must be .*, and offset at least 0, got \(73, 6\) and offset -1",
    ):
        call("attention", offset=-1)


def test_another_batch_size_of_k():
    with pytest.raises(
        ValueError,
        match=r"^attention: k must be \(B, N_kv, S, D\) = \(2, 2, 5, 6\), got \(3, 2, 5, 6\)",
    ):
        call("attention", k=torch.zeros(3, 2, 5, 6), v=torch.zeros(3, 2, 5, 6))


@pytest.mark.parametrize("name", ["q", "k", "v", "bias", "relative_keys"])
def test_key_rows_are_rejected_with_gradients(name):
    rows = torch.zeros(2, 5, dtype=torch.int64)
    with pytest.raises(
        RuntimeError, match=r"^attention: key_rows is for inference and must come without gradients"
    ):
        call("attention", key_rows=rows, **{name: lambda t: t.requires_grad_()})
    with torch.no_grad():
        call("attention", key_rows=rows, **{name: lambda t: t.requires_grad_()})
