"""The loop kernels of lstm and mogrifier_lstm (csrc/cuda/recurrence/loop.cu) on the simulated GPU.

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

pytestmark = pytest.mark.skipif(
    platform.machine() != "x86_64" or not shutil.which(build.CXX),
    reason="tests/simt needs g++ on x86-64",
)
# Constants made smaller, so that small tensors need several chunks of steps and several slices.
SMALL = {
    "loop.cu": {"HOISTED = int64_t(1) << 28": "HOISTED = 4000"},
    "weight_gradients.cu": {"SLICE = 64": "SLICE = 3"},
}
# T, B, X, H
SIZES = [(1, 5, 3, 1), (3, 2, 2, 3), (4, 5, 9, 17), (2, 3, 64, 17), (3, 4, 17, 64)]
LSTM_OPTIONS = [
    {},
    {"bias": False, "lengths": True},
    {"weight_drop": 0.5, "seed": -7},
    {"weight_drop": 0.5, "variational": True, "seed": 7},
    {"weight_drop": 1.0, "lengths": True},
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


def normal(shape, seed, own, scale=1.0):
    return (torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * scale).to(own)


def lengths_of(T, B):
    return torch.arange(B) % (T + 1)


def cell(size, own, bias=True):
    T, B, X, H = size
    w = 0.5 / H**0.5
    shapes = (T, B, X), (4 * H, X), (4 * H, H), (4 * H,), (B, H), (B, H)
    x, W_ih, W_hh, b, h0, c0 = (
        normal(shape, i, own, w if 0 < i < 3 else 1.0) for i, shape in enumerate(shapes)
    )
    return x, W_ih, W_hh, b if bias else None, h0, c0


def lstm(size, own, bias=True, lengths=False, **options):
    T, B, _, _ = size
    return cell(size, own, bias), options | ({"lengths": lengths_of(T, B)} if lengths else {})


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


def mogrifier(size, own, rounds, shared=False, rank=0, bias=True, lengths=False, **options):
    (T, B, X, H), uses = size, ((rounds + 1) // 2, rounds // 2)
    Q = weights(uses[0], shared, rank, X, H, 10, own)
    R = weights(uses[1], shared, rank, H, X, 20, own)
    if bias and rounds:
        options["Q_bias"] = normal((1 if shared else uses[0], X), 30, own)
    if bias and rounds > 1:
        options["R_bias"] = normal((1 if shared else uses[1], H), 31, own)
    if lengths:
        options["lengths"] = lengths_of(T, B)
    return (*cell(size, own, bias), Q, R), {"rounds": rounds, "seed": 2**63 - 5, **options}


@pytest.fixture(scope="module")
def libraries():
    return {mode: build.library(mode, SMALL) for mode in ("plain", "checked")}


def check(path, op, args, kwargs, order):
    with Simulated(path) as kernels:
        testing.check(op, args, kwargs, function=operators(kernels, order)[op])


@pytest.mark.parametrize("own", TYPES, ids=str)
@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize("options", LSTM_OPTIONS, ids=str)
def test_lstm(libraries, own, size, options):
    check(libraries["plain"], "lstm", *lstm(size, own, **options), order=sum(size))


@pytest.mark.parametrize("own", TYPES, ids=str)
@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_mogrifier_lstm(libraries, own, size, options):
    check(
        libraries["plain"],
        "mogrifier_lstm",
        *mogrifier(size, own, **OPTIONS[options]),
        order=sum(size),
    )


@pytest.mark.parametrize("own", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("options", [None, "five rounds", "dropped", "low rank, shared"])
@pytest.mark.parametrize("size", SIZES[1:3], ids=str)
def test_no_races_and_no_uninitialised_reads(libraries, own, size, options):
    if options:
        op, (args, kwargs) = "mogrifier_lstm", mogrifier(size, own, **OPTIONS[options])
    else:
        op, (args, kwargs) = "lstm", lstm(size, own)
    check(libraries["checked"], op, args, kwargs, order=1)


DEFECTS = {  # source, old text, new text
    "wrong mask index": (
        "loop_step.cuh",
        "keep_bits(m, a.seed, t * a.B + b, j, a.H)",
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
}


@pytest.mark.parametrize("defect", DEFECTS)
def test_a_defect_fails(defect):
    source, old, new = DEFECTS[defect]
    path = build.library("plain", {**SMALL, source: {**SMALL.get(source, {}), old: new}})
    with pytest.raises((AssertionError, RuntimeError)):
        check(
            path,
            "mogrifier_lstm",
            *mogrifier((4, 5, 9, 17), torch.float32, **OPTIONS["dropped"]),
            order=0,
        )
