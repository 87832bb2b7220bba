"""The recurrences as nvcc compiled them: the PTX of the loop, the persistent kernels and the
wavefront.

The calls, the oracle and the error budget are those of tests/simt, which executes the same kernels
as C++. Every kernel that sm_90a has is called here, and those of sm_80 in bf16 in
test_ptx_recurrence_sm_80.py.
"""

import platform
import shutil

import pytest
import torch

from tests.ptx import build
from tests.simt import build as simt
from tests.simt import test_simt_cells as cells
from tests.simt import test_simt_persistent as persistent
from tests.simt import test_simt_recurrence as loop
from tests.simt import test_simt_wavefront as wavefront
from tests.simt import test_simt_words as words
from tests.simt.test_simt_recurrence import OPTIONS, lstm, mogrifier

pytestmark = [
    pytest.mark.sampled_files("PTX", 5),
    pytest.mark.skipif(
        platform.machine() != "x86_64" or not shutil.which(simt.CXX),
        reason="tests/simt needs g++ on x86-64",
    ),
    pytest.mark.skipif(not build.nvcc(), reason="nvcc is not found"),
]
BF16, FP16, FP32, FP64 = torch.bfloat16, torch.float16, torch.float32, torch.float64
SIZE = 4, 5, 9, 17  # T, B, X, H


@pytest.fixture(scope="module")
def libraries():
    return {"sm_90a": build.library("plain", "sm_90a")}


@pytest.fixture(scope="module")
def checked():
    return build.library("checked", "sm_90a")


GPUS_AND_TYPES = [("sm_90a", own) for own in (BF16, FP16, FP32, FP64)]


@pytest.mark.parametrize(("gpu", "own"), GPUS_AND_TYPES, ids=str)
@pytest.mark.parametrize("size", [SIZE, (3, 30, 17, 24)], ids=str)
def test_loop(libraries, gpu, own, size):
    """B 30 in 3 steps are two slices of the sums of weight gradients."""
    path = libraries[gpu]
    for options in loop.LSTM_OPTIONS[1:4]:
        loop.check(path, "lstm", *lstm(size, own, **options), order=2)
    for name in ("five rounds", "low rank, shared", "dropped", "expected"):
        loop.check(path, "mogrifier_lstm", *mogrifier(size, own, **OPTIONS[name]), order=3)
    for options in loop.ORDERED.values():
        loop.check(path, "mogrifier_lstm", *mogrifier(size, own, **options), order=3)


@pytest.mark.parametrize("own", [BF16, FP32], ids=str)
@pytest.mark.parametrize("op", loop.CELLS)
def test_other_cells(libraries, own, op):
    path = libraries["sm_90a"]
    in_order = loop.ORDERS[-1] | loop.ZONEOUT
    for options in (in_order, {"weight_drop": 0.5, "seed": -7, "lengths": True}):
        if op == "rnn" and own == FP32:
            loop.check(path, op, *loop.of_cell(op, SIZE, own, relu=True, **options), 2)
        loop.check(path, op, *loop.of_cell(op, SIZE, own, **options), order=3)


@pytest.mark.parametrize(("gpu", "own"), [x for x in GPUS_AND_TYPES if x[1] != FP64], ids=str)
@pytest.mark.parametrize("options", [None, *OPTIONS])
def test_persistent(libraries, gpu, own, options):
    if options:
        call = "mogrifier_lstm", *mogrifier(SIZE, own, **OPTIONS[options])
    else:
        call = "lstm", *lstm(SIZE, own, True, True)
    persistent.check(libraries[gpu], *call, order=3)


@pytest.mark.parametrize(("gpu", "own"), [x for x in GPUS_AND_TYPES if x[1] != FP64], ids=str)
@pytest.mark.parametrize("layout", persistent.LAYOUTS)
def test_every_layout(libraries, gpu, own, layout):
    rounds, size, gpu_limits = persistent.LAYOUTS[layout]
    if own == FP32 and "plain" in layout:
        return  # fp32 has no such layout
    if rounds:
        call = "mogrifier_lstm", *mogrifier(size, own, rounds, state_dropout=0.3)
    else:
        call = "lstm", *lstm(size, own)
    persistent.check(libraries[gpu], *call, order=1, **gpu_limits)


@pytest.mark.parametrize(("gpu", "own"), [("sm_90a", BF16), ("sm_90a", FP32)])
@pytest.mark.parametrize("layout", cells.LAYOUTS)
@pytest.mark.parametrize("op", cells.CELLS)
def test_persistent_cells(libraries, gpu, own, op, layout):
    size, limits = cells.LAYOUTS[layout]
    if own == FP32 and layout not in cells.IN_FP32:
        return
    call = cells.call_of(op, size, own, **loop.ORDERS[-1], **loop.ZONEOUT)
    persistent.check(libraries[gpu], *call, order=1, **limits)


@pytest.mark.parametrize(("gpu", "own"), [("sm_90a", BF16), ("sm_90a", FP16)])
@pytest.mark.parametrize("layout", words.LAYOUTS)
def test_words_in_place_of_flags(libraries, gpu, own, layout):
    rounds, size, limits = words.LAYOUTS[layout]
    call = words.call_of(rounds, size, own)
    persistent.check(libraries[gpu], *call, order=2, engine="words", **limits)


def test_weights_in_registers(libraries):
    call = mogrifier((1, 3, 912, 912), BF16, 2)
    small = {"sms": 100, "shared": 190000}
    persistent.check(libraries["sm_90a"], "mogrifier_lstm", *call, order=1, **small)


@pytest.mark.parametrize(("gpu", "own"), [("sm_90a", BF16), ("sm_90a", FP16)])
@pytest.mark.parametrize("options", ["five rounds and one", "locked between", "lengths"])
def test_wavefront(libraries, gpu, own, options):
    call = wavefront.pair((4, 5, 9, 17, 12), own, *wavefront.LINKS[options])
    wavefront.check(libraries[gpu], *call, order=7)


@pytest.mark.slow
def test_a_size_of_production(libraries):
    """H 650, B 20 and 5 rounds on the 132 multiprocessors of an H100, forward and backward.

    A wrong fragment in one unrolled copy of an mma does not show in the smaller sizes.
    """
    call = mogrifier((1, 20, 650, 650), BF16, 5)
    persistent.check(libraries["sm_90a"], "mogrifier_lstm", *call, order=1, sms=132)


# ---- the checked build


@pytest.mark.parametrize("own", [BF16, FP32], ids=str)
def test_no_races_in_the_loop(checked, own):
    loop.check(checked, "mogrifier_lstm", *mogrifier((3, 2, 2, 3), own, **OPTIONS["dropped"]), 1)


@pytest.mark.parametrize("own", [BF16, FP32], ids=str)
@pytest.mark.parametrize("op", loop.CELLS)
def test_no_races_in_other_cells(checked, own, op):
    loop.check(checked, op, *loop.of_cell(op, (3, 2, 2, 3), own, **loop.ORDERS[-1]), 1)


@pytest.mark.parametrize("own", [BF16, FP32], ids=str)
@pytest.mark.parametrize("options", [None, "dropped"])
def test_no_races_in_the_persistent_kernels(checked, own, options):
    size = 3, 5, 9, 17
    if options:
        call = "mogrifier_lstm", *mogrifier(size, own, **OPTIONS[options])
    else:
        call = "lstm", *lstm(size, own)
    persistent.check(checked, *call, order=1)


@pytest.mark.parametrize("own", [BF16, FP32], ids=str)
@pytest.mark.parametrize("op", cells.CELLS)
def test_no_races_in_the_persistent_cells(checked, own, op):
    call = cells.call_of(op, (3, 5, 9, 17), own, **loop.ORDERS[-1], **loop.ZONEOUT)
    persistent.check(checked, *call, order=1)


@pytest.mark.parametrize("layout", ["no rounds, odd X", "every slot twice"])
def test_no_races_between_words(checked, layout):
    rounds, size, limits = words.LAYOUTS[layout]
    persistent.check(checked, *words.call_of(rounds, size), order=1, engine="words", **limits)


@pytest.mark.parametrize("options", ["five rounds and one", "everything dropped"])
def test_no_races_in_the_wavefront(checked, options):
    call = wavefront.pair((3, 5, 9, 17, 12), BF16, *wavefront.LINKS[options])
    wavefront.check(checked, *call, order=1)
