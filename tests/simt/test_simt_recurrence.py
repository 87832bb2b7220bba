"""The loop kernels of the recurrences (csrc/cuda/recurrence/loop.cu) on the simulated GPU.

Results and gradients are compared with the oracle. Plain loops in entries.cpp replace the vendor's
matrix products. Kernels with one changed line must fail.
"""

import platform
import shutil

import pytest
import torch
from fusedseq import testing

from tests.simt import build
from tests.simt.memory import Simulated
from tests.simt.recurrence import TYPES, operators

pytestmark = [
    pytest.mark.sampled_files("simulated GPU", 5),
    pytest.mark.skipif(
        platform.machine() != "x86_64" or not shutil.which(build.CXX),
        reason="tests/simt needs g++ on x86-64",
    ),
]
# Constants made smaller, so that small tensors need several chunks of steps, several slices, and
# several units of a row for each thread.
SMALL = {
    "loop.cu": {"HOISTED = int64_t(1) << 28": "HOISTED = 4000"},
    "loop_layer_norm.cuh": {"ROW_THREADS = 256": "ROW_THREADS = 4"},
    "weight_gradients.cu": {"SLICE = 64": "SLICE = 3"},
}
CELLS = ["gru", "rnn", "peephole_lstm", "layer_norm_lstm", "layer_norm_gru"]
# T, B, X, H
SIZES = [(1, 5, 3, 1), (3, 2, 2, 3), (4, 5, 9, 17), (2, 3, 64, 17), (3, 4, 17, 64)]
LSTM_OPTIONS = [
    {},
    {"bias": False, "lengths": True},
    {"weight_drop": 0.5, "seed": -7},
    {"weight_drop": 0.5, "variational": True, "seed": 7},
    {"weight_drop": 1.0, "lengths": True},
]
# Steps in another order, and sequences that start within a row.
ORDERS = [{"reverse": True}, {"starts": True}, {"reverse": True, "lengths": True, "starts": True}]
ZONEOUT = {"zoneout_h": 0.3, "zoneout_c": 0.4, "seed": 9}  # cells without c have no zoneout_c
CELL_OPTIONS = [
    {},
    ZONEOUT,
    ZONEOUT | {"lengths": True, "training": False},
    ZONEOUT | ORDERS[-1],
    *ORDERS,
    {"bias": False, "lengths": True, "starts": True},
    {"weight_drop": 0.5, "seed": -7, "lengths": True},
    {"weight_drop": 0.5, "variational": True, "seed": 7, "reverse": True},
]
OPTIONS = {  # of `mogrifier`
    "one round": {"rounds": 1},
    "five rounds": {"rounds": 5},
    "shared": {"rounds": 5, "shared": True},
    "low rank": {"rounds": 5, "rank": 2},
    "low rank, shared": {"rounds": 4, "rank": 3, "shared": True},
    "no bias": {"rounds": 2, "bias": False},
    "capped": {"rounds": 2, "cap_input_gate": True},
    "dropped": {
        "rounds": 3,
        "state_dropout": 0.4,
        "zoneout_h": 0.3,
        "zoneout_c": 0.2,
        "weight_drop": 0.3,
        "lengths": True,
    },
    "no rounds": {"rounds": 0, "state_dropout": 0.4, "zoneout_h": 0.3},
    "expected": {
        "rounds": 2,
        "state_dropout": 0.4,
        "zoneout_h": 0.3,
        "zoneout_c": 0.2,
        "weight_drop": 0.3,
        "training": False,
    },
}
ORDERED = {  # of `mogrifier`; the persistent kernels, whose tests have OPTIONS too, refuse these
    "reverse": {
        "rounds": 3,
        "state_dropout": 0.4,
        "zoneout_h": 0.3,
        "zoneout_c": 0.2,
        "lengths": True,
        "reverse": True,
    },
    "starts": {"rounds": 4, "rank": 2, "state_dropout": 0.4, "zoneout_h": 0.3, "starts": True},
    "reverse, starts": {
        "rounds": 2,
        "zoneout_h": 0.3,
        "zoneout_c": 0.2,
        "lengths": True,
        "starts": True,
        "reverse": True,
    },
}


def normal(shape, seed, own, scale=1.0):
    return (torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * scale).to(own)


def lengths_of(T, B):
    return torch.arange(B) % (T + 1)


def starts_of(T, B):
    """Also past the ends of sequences, where they do not count."""
    return torch.rand(T, B, generator=torch.Generator().manual_seed(T + B)) < 0.4


def in_order(size, options, lengths=False, starts=False):
    """The options of a call, with tensors in place of the flags `lengths` and `starts`."""
    T, B, _, _ = size
    options = options | ({"lengths": lengths_of(T, B)} if lengths else {})
    return options | ({"starts": starts_of(T, B)} if starts else {})


def cell(size, own, bias=True):
    T, B, X, H = size
    w = 0.5 / H**0.5
    shapes = (T, B, X), (4 * H, X), (4 * H, H), (4 * H,), (B, H), (B, H)
    x, W_ih, W_hh, b, h0, c0 = (
        normal(shape, i, own, w if 0 < i < 3 else 1.0) for i, shape in enumerate(shapes)
    )
    return x, W_ih, W_hh, b if bias else None, h0, c0


def lstm(size, own, bias=True, lengths=False, starts=False, **options):
    return cell(size, own, bias), in_order(size, options, lengths, starts)


def of_cell(op, size, own, bias=True, lengths=False, starts=False, **options):
    """The inputs of an operator of CELLS."""
    T, B, X, H = size
    if "lstm" not in op:
        options = {name: value for name, value in options.items() if name != "zoneout_c"}
    G, biases, w = {"rnn": 1}.get(op, 3 if "gru" in op else 4), {"rnn": 1}.get(op, 4), 0.5 / H**0.5
    shapes = (T, B, X), (G * H, X), (G * H, H), (biases * H,)
    inputs = [normal(shape, i, own, w if 0 < i < 3 else 1.0) for i, shape in enumerate(shapes)]
    if not bias:
        inputs[3] = None
    if op == "peephole_lstm":
        inputs.append(normal((3 * H,), 4, own))
    if op == "layer_norm_gru":
        inputs += [1 + normal((3 * H,), 10 + n, own, 0.3) for n in range(2)]
    if op == "layer_norm_lstm":
        inputs += [1 + normal((n * H,), 10 + n, own, 0.3) for n in (4, 4, 1)]
        inputs.append(normal((H,), 20, own, 0.3))
    states = 2 if "lstm" in op else 1
    inputs += [normal((B, H), 5 + i, own) for i in range(states)]
    return tuple(inputs), in_order(size, options, lengths, starts)


def weights(count, shared, rank, out, in_, seed, own):
    """Q or R: (n, out, in_), or its factors."""
    if count == 0:
        return None
    n = 1 if shared else count
    if not rank:
        return normal((n, out, in_), seed, own, in_**-0.5)
    return normal((n, out, rank), seed, own, rank**-0.5), normal(
        (n, rank, in_), seed + 1, own, in_**-0.5
    )


def mogrifier(
    size, own, rounds, shared=False, rank=0, bias=True, lengths=False, starts=False, **options
):
    (_, _, X, H), uses = size, ((rounds + 1) // 2, rounds // 2)
    Q = weights(uses[0], shared, rank, X, H, 10, own)
    R = weights(uses[1], shared, rank, H, X, 20, own)
    if bias and rounds:
        options["Q_bias"] = normal((1 if shared else uses[0], X), 30, own)
    if bias and rounds > 1:
        options["R_bias"] = normal((1 if shared else uses[1], H), 31, own)
    options = in_order(size, options, lengths, starts)
    return (*cell(size, own, bias), Q, R), {"rounds": rounds, "seed": 2**63 - 5, **options}


@pytest.fixture(scope="module")
def libraries():
    return {mode: build.library(mode, SMALL) for mode in ("plain", "checked")}


def check(path, op, args, kwargs, order):
    with Simulated(path) as kernels:
        testing.check(op, args, kwargs, function=operators(kernels, order)[op])


@pytest.mark.parametrize("own", TYPES, ids=str)
@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize("options", LSTM_OPTIONS + ORDERS, ids=str)
def test_lstm(libraries, own, size, options):
    check(libraries["plain"], "lstm", *lstm(size, own, **options), order=sum(size))


@pytest.mark.parametrize("own", TYPES, ids=str)
@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize("options", CELL_OPTIONS, ids=str)
@pytest.mark.parametrize("op", CELLS)
def test_other_cells(libraries, op, own, size, options):
    if "layer_norm" in op and size[3] == 1:
        size = (*size[:3], 2)  # the gradients of a norm over one unit are rounding errors
    if op == "layer_norm_gru":  # and so are most of those through 3 gates of few inputs
        size = (*size[:2], max(4, size[2]), size[3])
    # Not in 16 bits, where roundings take pre-activations to the other side of the kink.
    if op == "rnn" and own.itemsize >= 4 and sum(size) % 2:
        options = options | {"relu": True}
    check(libraries["plain"], op, *of_cell(op, size, own, **options), order=sum(size))


@pytest.mark.parametrize("own", TYPES, ids=str)
@pytest.mark.parametrize("options", OPTIONS | ORDERED)
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_mogrifier_lstm(libraries, own, size, options):
    check(
        libraries["plain"],
        "mogrifier_lstm",
        *mogrifier(size, own, **(OPTIONS | ORDERED)[options]),
        order=sum(size),
    )


@pytest.mark.parametrize("own", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    "options", [None, "five rounds", "dropped", "low rank, shared", "reverse, starts"]
)
@pytest.mark.parametrize("size", SIZES[1:3], ids=str)
def test_no_races_and_no_uninitialised_reads(libraries, own, size, options):
    if options:
        op = "mogrifier_lstm"
        args, kwargs = mogrifier(size, own, **(OPTIONS | ORDERED)[options])
    else:
        op, (args, kwargs) = "lstm", lstm(size, own)
    check(libraries["checked"], op, args, kwargs, order=1)


@pytest.mark.parametrize("own", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("op", ["lstm", *CELLS])
@pytest.mark.parametrize("size", SIZES[1:3], ids=str)
def test_no_races_in_another_order(libraries, own, size, op):
    if op == "lstm":
        args, kwargs = lstm(size, own, **ORDERS[-1])
    else:
        args, kwargs = of_cell(op, size, own, **ORDERS[-1], **ZONEOUT)
    check(libraries["checked"], op, args, kwargs, order=1)


DEFECTS = {  # source, old text, new text
    "wrong mask index": (
        "loop_step.cuh",
        "keep_bits(m, a.seed, mask_row(a, t, b), j, a.H)",
        "keep_bits(m, a.seed, t + b, j, a.H)",
    ),
    "no bounds check": ("loop_forward.cuh", "  if (j >= r.padded) return;\n", ""),
    "no lengths": ("loop_backward.cuh", "has_ended(a.lengths, g.t, b)", "false"),
    "raw gradient": (
        "weight_gradients.cu",
        "if (!r.weight.threshold) return nullptr;",
        "return nullptr;",
    ),
    "one slice": ("weight_gradients.cu", "slice < s.slices; ++slice", "slice < 1; ++slice"),
    "no reset of h": ("loop_forward.cuh", "resets(a, step_after(a, f.t), b)", "false"),
    "no reset of c": ("loop_forward.cuh", "Cell::HAS_C && !resets(a, f.t, b)", "Cell::HAS_C"),
    "gradient into a zeroed h": ("loop_backward.cuh", "if (resets(a, g.t, b)) {", "if (false) {"),
    "gradient into a zeroed c": ("loop_backward.cuh", "  if (reset)\n", "  if (false)\n"),
    "sum of one thread": ("loop_layer_norm.cuh", "v[n] = sums[n][0];", "(void)sums;"),
    "no bypass of h": ("loop_layer_norm_lstm.cuh", "= bypass(update[i], d_h);", "= C(0);"),
    "no bypass of c": ("loop_layer_norm_lstm.cuh", "dc[i] += past;", ""),
    "c after zoneout": ("loop_layer_norm_lstm.cuh", "update_c[i] == C(1)", "true"),
    "forward order": ("loop.cu", "r.reverse ? nth_step(r, n + steps - 1) : n", "n"),
}
ORDER_DEFECTS = [name for name in DEFECTS if "zeroed" in name or "reset" in name or "order" in name]


@pytest.mark.sampled(4)
@pytest.mark.parametrize("defect", DEFECTS)
def test_a_defect_fails(defect):
    source, old, new = DEFECTS[defect]
    path = build.library("plain", {**SMALL, source: {**SMALL.get(source, {}), old: new}})
    if source.startswith("loop_layer_norm"):
        inputs = of_cell("layer_norm_lstm", (4, 5, 9, 17), torch.float32, **ZONEOUT)
        call = "layer_norm_lstm", *inputs
    elif defect in ORDER_DEFECTS:
        call = "lstm", *lstm((4, 5, 9, 17), torch.float32, **ORDERS[-1])
    else:
        call = "mogrifier_lstm", *mogrifier((4, 5, 9, 17), torch.float32, **OPTIONS["dropped"])
    with pytest.raises((AssertionError, RuntimeError)):
        check(path, *call, order=0)
