"""Argument checks of the public functions `fused.<op>`: tensors, seeds and ids. The checks of
options are in test_option_errors.py, and those that few operators have in
test_<operators>_errors.py.

Each test changes one argument of a good call and expects an exception whose message names the
operator, the argument, what it must be and what was given: `lstm: W_hh must be (4H, H) = (16, 4),
got (16, 3)`.
"""

import inspect

import pytest
import torch
from fusedseq import fused
from fusedseq.testing import convert
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_map_only

from tests.support.good_calls import GOOD, B, call


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
    ("bidirectional_lstm", "x", (2, 5), r"\(T, B, X\)"),
    ("bidirectional_lstm", "W_hh_reverse", (16, 3), r"\(4H, H\) = \(16, 4\)"),
    ("bidirectional_lstm", "W_ih_reverse", (16, 4), r"\(4H, X\) = \(16, 5\)"),
    ("bidirectional_lstm", "b_reverse", (4,), r"\(4H,\) = \(16,\)"),
    ("bidirectional_lstm", "h0_reverse", (3, 4), r"\(B, H\) = \(2, 4\)"),
    ("bidirectional_lstm", "c0_reverse", (2, 5), r"\(B, H\) = \(2, 4\)"),
    ("projected_lstm", "x", (2, 5), r"\(T, B, X\)"),
    ("projected_lstm", "x", (0, 2, 5), r"T"),
    ("projected_lstm", "W_ih", (16, 4), r"\(4H, X\) = \(16, 5\)"),
    ("projected_lstm", "W_hh", (16, 4), r"\(4H, P\) = \(16, 3\)"),
    ("projected_lstm", "W_hr", (3,), r"\(P, H\)"),
    ("projected_lstm", "W_hr", (0, 4), r"P"),
    ("projected_lstm", "b", (4,), r"\(4H,\) = \(16,\)"),
    ("projected_lstm", "h0", (2, 4), r"\(B, P\) = \(2, 3\)"),
    ("projected_lstm", "c0", (2, 3), r"\(B, H\) = \(2, 4\)"),
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


FLOATS = [
    *(("lstm", name) for name in ("x", "W_ih", "W_hh", "b", "h0", "c0")),
    *(
        ("bidirectional_lstm", f"{name}{suffix}")
        for name in ("W_ih", "W_hh", "b", "h0", "c0")
        for suffix in ("", "_reverse")
    ),
    *(("projected_lstm", name) for name in ("x", "W_ih", "W_hh", "W_hr", "b", "h0", "c0")),
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
    "b_reverse",
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


SEEDED = [
    "attention",
    "bidirectional_lstm",
    "lstm",
    "mogrifier_lstm",
    "projected_lstm",
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


@pytest.mark.parametrize("good", ["linear", "attention", "lstm", "embedding", "dropout"])
def test_sparse_tensors_are_refused(good):
    """By name, and not by torch, which would only say that there is no kernel for them."""
    args, kwargs = GOOD[good].inputs()
    names = [*inspect.signature(getattr(fused, good)).parameters]
    position = next(i for i, t in enumerate(args) if t.is_floating_point())
    args = list(args)
    args[position] = args[position].detach().to_sparse()
    name = names[position]
    with pytest.raises(TypeError, match=rf"^{good}: {name} must be a dense tensor, got "):
        getattr(fused, good)(*args, **kwargs)


def test_an_id_that_is_a_number_is_refused():
    with pytest.raises(TypeError, match=r"^embedding: ids must be a tensor, got int"):
        fused.embedding(3, torch.zeros(7, 2))


def test_a_number_of_more_than_64_bits_is_refused():
    wanted = r"^linear_cross_entropy: ignore_index must be a whole number of 64 bits, got 118"
    with pytest.raises(ValueError, match=wanted):
        call("linear_cross_entropy", ignore_index=2**70)


def test_a_seed_without_a_value_is_refused():
    seed = torch.zeros((), dtype=torch.int64, device="meta")
    with pytest.raises(ValueError, match=r"^dropout: seed must have a value, got a tensor on meta"):
        fused.dropout(torch.ones(3), 0.5, seed)


@pytest.mark.parametrize("op", ["dropout", "linear", "residual_layer_norm", "embedding"])
def test_a_nested_tensor_is_named_by_operators_that_take_none(op):
    rows = [torch.randn(2, 3), torch.randn(4, 3)]
    x = torch.nested.nested_tensor(rows, layout=torch.jagged)
    ids = torch.nested.nested_tensor([torch.tensor([1, 2]), torch.tensor([0])], layout=torch.jagged)
    calls = {
        "dropout": lambda: fused.dropout(x, 0.5, 1),
        "linear": lambda: fused.linear(x, torch.randn(5, 3)),
        "residual_layer_norm": lambda: fused.residual_layer_norm(x),
        "embedding": lambda: fused.embedding(ids, torch.randn(5, 3), 0.5, 1),
    }
    with pytest.raises(TypeError, match=f"{op}: (x|ids) must be a dense tensor, got a nested"):
        calls[op]()


@pytest.mark.cpu
@pytest.mark.parametrize("op", ["attention", "lstm", "linear", "dropout", "residual_layer_norm"])
@pytest.mark.parametrize("kind", ["sparse", "nested with strides"])
def test_a_tensor_that_is_not_dense_is_named(op, kind):
    """Also in calls without options, whose arguments C++ checks first."""
    rows = [torch.randn(2, 4), torch.randn(3, 4)]
    x = (
        torch.nested.nested_tensor(rows)
        if kind != "sparse"
        else torch.randn(1, 1, 3, 4).to_sparse()
    )
    q = torch.randn(1, 1, 3, 4)
    shapes = ((20, 4), (20, 5), (20,), (2, 5), (2, 5))
    calls = {
        "attention": (lambda: fused.attention(q, x, q), "k"),
        "lstm": (lambda: fused.lstm(x, *(torch.randn(shape) for shape in shapes)), "x"),
        "linear": (lambda: fused.linear(q, x), "W"),
        "dropout": (lambda: fused.dropout(x, 0.5, 1), "x"),
        "residual_layer_norm": (lambda: fused.residual_layer_norm(x), "x"),
    }
    call, name = calls[op]
    with pytest.raises(TypeError, match=f"{op}: {name} must be a dense tensor, got"):
        call()
