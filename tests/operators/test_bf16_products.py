"""Products of bfloat16 numbers on the CPU: docs/precision.md.

With torch.set_float32_matmul_precision("medium") the operands of fp32 products are rounded to
bfloat16 and their products are added in fp32. All else, and by default the products too, is exact.
"""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from fusedseq import _load, fused
from fusedseq.fused.explain_calls import PRODUCTS
from fusedseq.testing import (
    attention_case,
    bidirectional_lstm_case,
    check,
    hidden_state_case,
    linear_case,
    linear_cross_entropy_case,
    lstm_case,
    lstm_with_vectors_case,
    mogrifier_lstm_case,
    mogrifier_lstm_pair_case,
    projected_lstm_case,
    run,
    split_cross_entropy_case,
    varlen_case,
)
from torch.utils._pytree import tree_leaves

pytestmark = pytest.mark.cpu
HAS_PAIRS = _load.multiplies_bf16()
ONLY_WITH_PAIRS = pytest.mark.skipif(
    not HAS_PAIRS, reason=f"the kernels used, {_load.isa('used')}, multiply no bfloat16 numbers"
)
# Sizes that select each of the products: one, few and many rows, odd and even depths; rows of a
# power of two, which tile registers copy, depths that do not fill a tile register, and one that is
# computed in parts.
SIZES = [
    (1, 64, 40),
    (7, 77, 33),
    (20, 64, 70),
    (64, 128, 65),
    (150, 33, 130),
    (300, 96, 64),
    (145, 1024, 50),
    (97, 1030, 35),
    (577, 3301, 300),
]


@pytest.fixture
def medium():
    torch.set_float32_matmul_precision("medium")
    yield
    torch.set_float32_matmul_precision("highest")


def linear_and_gradients(M, K, N, dtype=torch.float32):
    args, kwargs = linear_case(M, K, N).inputs(dtype=dtype)
    (y,), grads = run(fused.linear, args, kwargs)
    return args, y, grads


def largest_error(found, exact):
    return ((found.double() - exact).abs().max() / exact.abs().max()).item()


@ONLY_WITH_PAIRS
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_medium_rounds_the_operands_alone(size, medium):
    """The product of the rounded operands, to the roundings of a sum in fp32. Up to 64 rows the
    product in fp32 takes no longer, and is computed."""
    (x, W, b), y, _ = linear_and_gradients(*size)
    x, W, b = (t.detach() for t in (x, W, b))
    rounded = x.bfloat16().double() @ W.bfloat16().double().T + b.double()
    exact = x.double() @ W.double().T + b.double()
    few = size[0] <= 64
    of_sums = 8 * torch.finfo(torch.float32).eps * size[1] ** 0.5
    assert largest_error(y, exact if few else rounded) < of_sums
    assert largest_error(y, rounded if few else exact) > 10 * of_sums


@ONLY_WITH_PAIRS
@pytest.mark.parametrize("setting", ["highest", "high"])
def test_fp32_is_exact_by_default(setting):
    torch.set_float32_matmul_precision(setting)
    try:
        (x, W, b), y, _ = linear_and_gradients(300, 96, 64)
    finally:
        torch.set_float32_matmul_precision("highest")
    exact = x.double() @ W.double().T + b.double()
    assert largest_error(y, exact) < 1e-5


@ONLY_WITH_PAIRS
def test_the_setting_of_torchs_backend_counts_too():
    backend = torch.backends.mkldnn.matmul
    before = backend.fp32_precision
    _, exact, _ = linear_and_gradients(300, 96, 64)
    backend.fp32_precision = "bf16"
    try:
        _, y, _ = linear_and_gradients(300, 96, 64)
    finally:
        backend.fp32_precision = before
    _, again, _ = linear_and_gradients(300, 96, 64)
    assert not torch.equal(y, exact)
    assert torch.equal(again, exact)


OPERATORS = {
    "attention of short sequences": attention_case(3, 2, 7, 9, 32),
    "attention by blocks": attention_case(2, 2, 70, 75, 33, "biasNLS", "lengths", causal=True),
    "attention with positions": attention_case(2, 4, 60, 60, 24, "rope", "relative5", N_kv=2),
    "attention_varlen": varlen_case((5, 0, 33, 1, 60), (5, 3, 33, 1, 70), 2, 24),
    "linear": linear_case(150, 64, 90),
    "lstm": lstm_case(3, 9, 33, 40),
    "bidirectional_lstm": bidirectional_lstm_case(3, 9, 33, 40),
    "mogrifier_lstm": mogrifier_lstm_case(3, 9, 33, 40, 5),
    "mogrifier_lstm of a low rank": mogrifier_lstm_case(3, 9, 33, 40, 5, rank=7),
    "mogrifier_lstm_pair": mogrifier_lstm_pair_case(3, 9, 33, 40, 40, 5, 5),
    "peephole_lstm": lstm_with_vectors_case("peephole_lstm", 3, 9, 33, 40),
    "layer_norm_lstm": lstm_with_vectors_case("layer_norm_lstm", 3, 9, 33, 40),
    "projected_lstm": projected_lstm_case(3, 9, 33, 40, P=17),
    "gru": hidden_state_case("gru", 3, 9, 33, 40),
    "layer_norm_gru": hidden_state_case("layer_norm_gru", 3, 9, 33, 40),
    "rnn": hidden_state_case("rnn", 3, 9, 33, 40),
    "linear_cross_entropy": linear_cross_entropy_case(40, 33, 300),
    "split_cross_entropy": split_cross_entropy_case(40, 33, 300, (50, 120)),
}


def test_every_operator_with_products_has_a_case_and_a_word_in_the_docs():
    assert {case.op for case in OPERATORS.values()} == {*PRODUCTS}
    page = (Path(__file__).parents[2] / "docs/precision.md").read_text()
    named = page.partition("This holds for")[2].partition(".")[0]
    assert {*re.findall("`(.+?)`", named)} == {*PRODUCTS}


@ONLY_WITH_PAIRS
@pytest.mark.parametrize("name", OPERATORS)
def test_medium_costs_the_precision_of_bfloat16_and_no_more(name, medium):
    """Results and gradients in fp32, against those in fp64: an error of some roundings of
    2 ** -9."""
    case = OPERATORS[name]
    function = getattr(fused, case.op)
    found = run(function, *case.inputs(dtype=torch.float32))
    exact = run(function, *case.inputs(dtype=torch.float64))
    errors = []
    for a, b in zip([*found[0], *found[1]], [*exact[0], *exact[1]], strict=True):
        if a.is_floating_point():
            assert a.dtype == torch.float32
            errors.append(largest_error(a, b))
    assert 1e-5 < max(errors) < 0.03


@pytest.mark.parametrize("M", [1023, 1024, 1025, 2100])
def test_weight_gradients_of_one_and_of_several_passes(M):
    """More rows than csrc/cpu/gemm/transposed.h packs at once: their sums are kept in fp32."""
    x, W, dy = (torch.randn(M, 21), torch.randn(75, 21), torch.randn(M, 75))
    x, W, dy = (t.bfloat16() for t in (x, W, dy))
    W.requires_grad_()
    (dW,) = torch.autograd.grad(fused.linear(x, W), W, dy)
    exact = dy.double().T @ x.double()
    assert dW.dtype == torch.bfloat16
    rounding = exact.abs() * torch.finfo(torch.bfloat16).eps / 2
    sums = M * torch.finfo(torch.float32).eps * dy.abs().max() * x.abs().max()
    assert ((dW.double() - exact).abs() <= rounding + sums).all()


@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize(("K", "N"), [(40, 2080), (2080, 40)], ids=["y", "dx"])
def test_results_larger_than_the_caches(threads, count, K, N):
    """8 MiB and more are written past the caches where a part of the columns begins at a cache
    line, as that of one thread and the first of two threads do.
    """
    threads(count)
    args, kwargs = linear_case(2100, K, N).inputs(dtype=torch.bfloat16)
    check("linear", args, kwargs)


@ONLY_WITH_PAIRS
def test_bf16_tensors_are_added_in_fp32():
    """A sum of 4096 ones is exact; bfloat16 numbers would stop to change at 256."""
    for M in (1, 20, 200):
        x, W = torch.ones(M, 4096, dtype=torch.bfloat16), torch.ones(3, 4096, dtype=torch.bfloat16)
        assert fused.linear(x, W).eq(4096).all()


@ONLY_WITH_PAIRS
def test_nan_and_infinity_pass_through():
    for bad in (float("nan"), float("inf"), -float("inf")):
        for M, K in ((1, 64), (20, 64), (200, 64), (200, 38)):
            x, W = torch.ones(M, K, dtype=torch.bfloat16), torch.ones(3, K, dtype=torch.bfloat16)
            x[0, 5] = bad
            y = fused.linear(x, W)
            torch.testing.assert_close(
                y[0], torch.full((3,), bad, dtype=y.dtype), equal_nan=True, rtol=0, atol=0
            )
            assert y[1:].eq(K).all()


@ONLY_WITH_PAIRS
def test_the_set_without_pairs_computes_bf16_in_fp32():
    """FUSEDSEQ_ISA chooses; the last bits differ from those of products of pairs."""
    program = (
        "import torch; from fusedseq import fused, _load; torch.manual_seed(0); "
        "torch.set_float32_matmul_precision('medium'); "
        "x, W = torch.randn(200, 96), torch.randn(64, 96); "
        "error = (fused.linear(x, W) - x.double() @ W.double().T).abs().max().item(); "
        "print(_load.isa('used'), error < 1e-4)"
    )
    isa = _load.isa("used").rsplit("_", 1)[0]
    env = os.environ | {"FUSEDSEQ_ISA": isa, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    command = [sys.executable, "-c", program]
    process = subprocess.run(command, env=env, capture_output=True, text=True, check=True)
    assert process.stdout.split() == [isa, "True"]


def explained_under_autocast(dtype, op, *args, **kwargs):
    with torch.autocast("cpu", dtype):
        return fused.explain(op, *args, **kwargs)


@pytest.mark.parametrize("name", OPERATORS)
def test_explain_says_what_a_call_under_autocast_does(name):
    """fp32 tensors give the text of bf16 tensors, and the results are bf16."""
    case = OPERATORS[name]
    in_fp32, in_bf16 = (case.inputs(dtype=dtype) for dtype in (torch.float32, torch.bfloat16))
    of_bf16 = fused.explain(case.op, *in_bf16[0], **in_bf16[1])
    args, kwargs = in_fp32
    assert "bfloat16" in of_bf16
    assert explained_under_autocast(torch.bfloat16, case.op, *args, **kwargs) == of_bf16
    assert "bfloat16" not in fused.explain(case.op, *args, **kwargs)
    with torch.autocast("cpu", torch.bfloat16), torch.no_grad():
        results = tree_leaves(getattr(fused, case.op)(*args, **kwargs))
        is_loss = case.op.endswith("cross_entropy")
        assert {t.dtype for t in results} == {torch.float32 if is_loss else torch.bfloat16}
        with torch.autocast("cpu", enabled=False):
            assert "bfloat16" not in fused.explain(case.op, *args, **kwargs)


def test_explain_leaves_the_dtypes_that_autocast_leaves():
    x, wide = torch.randn(200, 96), torch.randn(200, 96, dtype=torch.float64)
    for op, args, dtype in (
        ("linear", (wide, wide), "float64"),
        ("linear", (x.half(), x.half()), "bfloat16"),
        ("linear", (), "bfloat16"),
        ("dropout", (x, 0.5, 1), "float32"),
        ("dropout", (), "float32"),
        ("bias_activation_dropout", (x.bfloat16(), x[0]), "bfloat16"),
        # The widest of the dtypes, as that of a sum.
        ("residual_layer_norm", (x.bfloat16(), x), "float32"),
        ("residual_layer_norm", (x.bfloat16(), x.bfloat16()), "bfloat16"),
    ):
        text = explained_under_autocast(torch.bfloat16, op, *args)
        assert text.startswith(f"{op} on cpu, {dtype}: "), text


def test_explain_says_how_products_are_computed():
    x, W = torch.randn(200, 96), torch.randn(64, 96)
    in_bf16, exact = "multiplied as bfloat16 numbers", "computed in float32"
    assert in_bf16 not in fused.explain("linear", x, W)
    text = fused.explain("linear", x.bfloat16(), W.bfloat16())
    assert (in_bf16 if HAS_PAIRS else exact) in text
    torch.set_float32_matmul_precision("medium")
    try:
        assert (in_bf16 in fused.explain("linear", x, W)) == HAS_PAIRS
        assert in_bf16 not in fused.explain("linear", x[:64], W)
        assert in_bf16 not in fused.explain("dropout", x, 0.5, 1)
        q, kv = torch.randn(1, 2, 20, 8), torch.randn(1, 2, 30, 8)
        assert (in_bf16 in fused.explain("attention", q, kv, kv)) == HAS_PAIRS
        assert in_bf16 not in fused.explain("attention", q[:, :, :1], kv, kv)
    finally:
        torch.set_float32_matmul_precision("highest")
