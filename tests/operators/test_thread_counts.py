"""A result does not depend on the number of CPU threads, bit for bit.

The threads of a call share the columns or rows of each product, so the order of every sum must be
the same whatever the share of a thread is. Results and gradients of calls on one to five threads
are compared exactly.
"""

import pytest
import torch
from fusedseq import fused
from fusedseq.testing import (
    attention_case,
    bias_activation_dropout_case,
    check,
    hidden_state_case,
    linear_case,
    linear_cross_entropy_case,
    lstm_case,
    lstm_with_vectors_case,
    mogrifier_lstm_case,
    projected_lstm_case,
    residual_layer_norm_case,
    run,
)

pytestmark = pytest.mark.cpu

# Widths that leave every rest modulo the vectors of each instruction set, and real ones.
WIDTHS = (1, 3, 8, 16, 17, 24, 31, 40, 49, 63, 65, 72, 88, 97, 130, 152, 200, 264, 333, 513, 650)


def assert_independent_of_threads(case, threads, dtype=torch.float32, most=5):
    """Compares results and gradients of 2 to `most` threads with those of one."""
    found = []
    for count in range(1, most + 1):
        threads(count)
        results, gradients = run(getattr(fused, case.op), *case.inputs(dtype=dtype))
        found.append((*results, *gradients))
    for count, of_count in enumerate(found[1:], 2):
        for i, (one, several) in enumerate(zip(found[0], of_count, strict=True)):
            assert torch.equal(one, several), f"{case}: result {i} differs with {count} threads"


# The products of bf16 tensors multiply pairs of numbers, where the processor can.
PRODUCTS = pytest.mark.parametrize("number", [torch.float32, torch.bfloat16], ids=str)


@PRODUCTS
@pytest.mark.parametrize("H", [*WIDTHS, 700])
def test_recurrences(H, number, threads):
    """The number of rows changes the height of the tiles, so it changes with H."""
    B, X = 1 + H % 7, H // 2 + 5
    assert_independent_of_threads(lstm_case(2, B, X, H), threads, number)
    assert_independent_of_threads(mogrifier_lstm_case(2, B + 3, X, H, 2), threads, number)


@PRODUCTS
@pytest.mark.parametrize("H", [1, 8, 17, 40, 97, 264])
@pytest.mark.parametrize("op", ["layer_norm_gru", "layer_norm_lstm", "peephole_lstm"])
def test_cells_with_vectors(op, H, number, threads):
    """With 70 rows the threads share rows, with few rows columns."""
    make = hidden_state_case if "gru" in op else lstm_with_vectors_case
    for B in (1 + H % 7, 70):
        case = make(op, 3, B, H // 2 + 5, H, zoneout_h=0.2, seed=3)
        assert_independent_of_threads(case, threads, number)


@PRODUCTS
@pytest.mark.parametrize("P", [1, 8, 17, 40, 97, 264])
def test_projections(P, number, threads):
    for B in (1 + P % 7, 70):
        case = projected_lstm_case(3, B, 20, 33 + P, P=P, zoneout_c=0.2, seed=3)
        assert_independent_of_threads(case, threads, number)


@pytest.mark.parametrize("options", [{"rank": 5}, {"zoneout_h": 0.5, "seed": 3}], ids=str)
def test_recurrences_with_options(options, threads):
    for dtype in (torch.float32, torch.float64, torch.bfloat16):
        case = mogrifier_lstm_case(3, 5, 61, 65, 5, **options)
        assert_independent_of_threads(case, threads, dtype)


@pytest.mark.parametrize("B", [16, 17, 23, 24, 33, 41, 49, 70, 147])
def test_recurrences_of_many_rows(B, threads):
    """Threads that get 8 rows or more each share the rows of the batch, otherwise the columns."""
    options = {"zoneout_h": 0.5, "state_dropout": 0.3, "seed": 3}
    for case in (
        lstm_case(3, B, 33, 40),
        lstm_case(3, B, 70, 130, weight_drop=0.4, seed=3),
        mogrifier_lstm_case(3, B, 33, 72, 5, **options),
        mogrifier_lstm_case(3, B, 72, 40, 4, rank=20),
    ):
        for dtype in (torch.float32, torch.float64, torch.bfloat16):
            assert_independent_of_threads(case, threads, dtype)


# Sequences that end early, an empty one, and steps at which a row starts again.
ORDER = {"lengths": [50, 1, 30, 0, 49], "starts": [(0, 1), (3, 0), (29, 2), (49, 4)]}


@pytest.mark.slow
@pytest.mark.parametrize(
    "case",
    [
        lstm_case(50, 5, 7, 1050, **ORDER),
        lstm_case(50, 5, 7, 1050, zoneout_h=0.3, zoneout_c=0.2, seed=3, reverse=True),
        mogrifier_lstm_case(50, 5, 30, 1050, 3, **ORDER, state_dropout=0.4, seed=3),
        mogrifier_lstm_case(50, 5, 30, 1050, 2, rank=9),
        projected_lstm_case(50, 5, 7, 1060, P=1050, **ORDER),
        hidden_state_case("gru", 50, 5, 7, 1050, **ORDER),
        lstm_with_vectors_case("layer_norm_lstm", 50, 5, 7, 1050, **ORDER),
    ],
    ids=str,
)
def test_recurrences_larger_than_a_cache(case, threads):
    """What is saved, and y, are large enough for streaming stores, and y's rows are not aligned."""
    assert_independent_of_threads(case, threads, most=3)
    threads(2)
    args, kwargs = case.inputs()
    check(case.op, args, kwargs)


@PRODUCTS
@pytest.mark.parametrize("M", [1, 5, 12, 29, 64, 150])
def test_linear(M, number, threads):
    """The numbers of rows M select each of the products of csrc/cpu/gemm/linear.h."""
    for N in WIDTHS[1::2]:
        assert_independent_of_threads(linear_case(M, 64, N), threads, number)
        assert_independent_of_threads(linear_case(M, 77, N), threads, number)
    assert_independent_of_threads(linear_case(M, 64, 77), threads, torch.float64)


@pytest.mark.parametrize("V", [1, 200, 577, 2500])
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_linear_cross_entropy(V, reduction, threads):
    options = {"reduction": reduction, "label_smoothing": 0.1, "return_details": True}
    for dtype in (torch.float32, torch.float64, torch.bfloat16):
        for N, E in ((30, 20), (310, 20), (6, 64), (48, 64)):
            case = linear_cross_entropy_case(N, E, V, weighted=True, **options)
            assert_independent_of_threads(case, threads, dtype)


@pytest.mark.parametrize(
    "case",
    [
        attention_case(8, 8, 16, 7, 20),
        attention_case(1, 1, 100, 65, 30),
        attention_case(1, 2, 300, 130, 24, causal=True),
        attention_case(1, 2, 200, 200, 24, "rope", N_kv=1, dropout=0.3, seed=7),
        attention_case(3, 1, 97, 130, 40, "lengths"),
        attention_case(1, 2, 1, 300, 24),
        attention_case(50, 8, 6, 7, 20, "biasNLS"),
        attention_case(31, 3, 6, 7, 20, "biasBLS", causal=True),
        attention_case(1, 1, 100, 65, 30, "biasL"),
        attention_case(5, 3, 97, 130, 24, "biasNLS", "relative16"),
        attention_case(3, 9, 50, 40, 16, "biasNLS"),
        attention_case(2, 8, 50, 40, 16, "biasBN", "relative2", causal=True),
        attention_case(2, 6, 65, 60, 20, "biasS", N_kv=2, dropout=0.3, seed=7),
        attention_case(3, 2, 50, 50, 16, "relative3", "rope", causal=True),
    ],
    ids=str,
)
def test_attention(case, threads):
    """The gradients of a bias and of relative keys are sums over the batch, heads and queries."""
    assert_independent_of_threads(case, threads)
    assert_independent_of_threads(case, threads, torch.float64)


@pytest.mark.parametrize("shape", [(5, 3), (40, 300), (700, 33), (4097, 9)], ids=str)
def test_layers_around_a_sublayer(shape, threads):
    for case in (
        residual_layer_norm_case(shape, p=0.3, seed=5),
        bias_activation_dropout_case(shape, "gelu", p=0.3, seed=5),
    ):
        assert_independent_of_threads(case, threads)
