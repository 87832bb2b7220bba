"""The persistent kernels that exchange words in place of flags, on a simulated GPU with few
multiprocessors: results and gradients are compared with the oracle, kernels with one changed line
must fail, and a lost block is reported. Further: when the plan has words.
"""

import platform
import shutil

import pytest
import torch
from fusedseq import _C

from tests.simt import build
from tests.simt.memory import Simulated
from tests.simt.test_simt_lost_block import FEW_POLLS, run
from tests.simt.test_simt_persistent import CASES, H200, RESIDENT, SMALL, check, of_one_variant
from tests.simt.test_simt_recurrence import OPTIONS, lstm, mogrifier

pytestmark = [
    pytest.mark.sampled_files("simulated GPU", 5),
    pytest.mark.skipif(
        platform.machine() != "x86_64" or not shutil.which(build.CXX),
        reason="tests/simt needs g++ on x86-64",
    ),
]
BF16 = torch.bfloat16
# {name: (rounds, (T, B, X, H), the GPU)}; T is such that every slot of a vector is used again.
LAYOUTS = {
    "no rounds, odd X": (0, (40, 5, 9, 18), {"sms": 4}),
    "one block owns all": (1, (20, 3, 2, 2), {"sms": 4}),
    "every slot twice": (5, (12, 5, 10, 18), {"sms": 4}),
    "several k-steps": (5, (2, 20, 70, 64), {"sms": 11}),
    "more blocks than inputs": (3, (4, 3, 4, 40), {"sms": 12}),
    "even rounds": (2, (18, 5, 10, 18), {"sms": 5}),
    "wide": (5, (3, 5, 50, 64), {"sms": 8}),
    "wide, no rounds": (0, (20, 20, 9, 40), {"sms": 5}),
    "two replicas": (3, (2, 40, 20, 34), {"sms": 12}),
}


@pytest.fixture(scope="module")
def libraries():
    return {mode: build.library(mode, SMALL) for mode in ("plain", "checked")}


def plan(steps, B, X, H, rounds, protocol="words", element=2, **gpu):
    gpu = H200 | gpu
    size = steps, B, X, H, rounds, (rounds + 1) // 2, rounds // 2, element
    limits = gpu["sms"], gpu["shared"], gpu["cooperative"]
    return _C.recurrence_plan(*size, *limits, min(steps, 4), protocol)


def call_of(rounds, size, own=BF16, **options):
    if rounds:
        return "mogrifier_lstm", *mogrifier(size, own, rounds, **options)
    return "lstm", *lstm(size, own, True, True)


# ---- the kernels


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("order", [0, 3])
def test_every_layout(libraries, layout, order):
    rounds, size, gpu = LAYOUTS[layout]
    found = plan(*size, rounds, **gpu)
    assert all(found[direction]["words"] for direction in RESIDENT)
    assert found["forward"]["wide"] == ("wide" in layout)
    assert found["forward"]["replicas"] == 1 + ("replicas" in layout)
    call = call_of(rounds, size, **({"state_dropout": 0.3} if rounds else {}))
    check(libraries["plain"], *call, order=order, engine="words", **gpu)


@pytest.mark.parametrize("options", OPTIONS)
def test_every_option(libraries, options):
    call = "mogrifier_lstm", *mogrifier((4, 5, 10, 18), BF16, **OPTIONS[options])
    check(libraries["plain"], *call, order=4, engine="words")


@pytest.mark.parametrize("layout", ["no rounds, odd X", "every slot twice", "wide"])
@pytest.mark.parametrize("order", [1, 2])
def test_no_races_and_no_uninitialised_reads(libraries, layout, order):
    rounds, size, gpu = LAYOUTS[layout]
    check(libraries["checked"], *call_of(rounds, size), order=order, engine="words", **gpu)


@pytest.mark.parametrize("engine", ["persistent, words", "words, loop"])
def test_the_other_direction_may_have_flags_or_the_loop(libraries, engine):
    call = mogrifier((4, 5, 10, 18), BF16, **OPTIONS["dropped"])
    check(libraries["plain"], "mogrifier_lstm", *call, order=2, engine=engine)


# ---- defects

WORDS_VARIANT = "Launch<__nv_bfloat16>{p, stream}(Variant<1, 2, false, 0, 0, true>())"


def of_words():
    """The `changes` of build.library with which the kernels in bf16 exchange words."""
    changes = of_one_variant("__half", "__nv_bfloat16", "float")
    for texts in changes.values():
        (name,) = (old for old in texts if "__nv_bfloat16" in old)
        texts[name] = WORDS_VARIANT
    return changes


ONE = of_words()
PLAIN = "lstm", *lstm((40, 5, 8, 18), BF16, True, True)
MOGRIFIER = "mogrifier_lstm", *mogrifier((12, 5, 10, 18), BF16, rounds=5)
DEFECTS = {  # file, old, new
    "no reset": (
        "persistent_group.cuh",
        "    ptx::store_words(reinterpret_cast<uint32_t*>(slot(v, use - RESET_AFTER) + at), 0);\n",
        "",
    ),
    "no reset of the gates' gradient": (
        "persistent_exchange.cuh",
        "    ptx::store_words(reinterpret_cast<uint2*>(old + at), uint2{0, 0});\n",
        "",
    ),
    "no fence": ("persistent_group.cuh", "if (epoch % plan::FENCE_PERIOD == 0) ptx::fence();", ""),
    "a reset one use early": ("persistent_exchange.cuh", "RESET_AFTER = 2;", "RESET_AFTER = 1;"),
    "zeros are empty": ("persistent_exchange.cuh", "return w ? w : ZEROS;", "return w;"),
    "padding is empty": (
        "persistent_group.cuh",
        "store_words(words + s * slot_words + i, ZEROS)",
        "store_words(words + s * slot_words + i, 0)",
    ),
}


@pytest.mark.sampled(4)
@pytest.mark.parametrize("defect", DEFECTS)
def test_a_defect_fails(defect):
    file, old, new = DEFECTS[defect]
    path, right = build.library("plain", {**ONE, file: {old: new}}), build.library("plain", ONE)
    seen = 0
    for order in range(1, 6):
        for call in (PLAIN, MOGRIFIER):
            try:
                check(path, *call, order=order, engine="words")
            except (AssertionError, RuntimeError):
                seen += 1
            else:
                continue
            check(right, *call, order=order, engine="words")
            return
    assert seen


# ---- a lost block

LOST = {
    "persistent_group.cuh": {
        "column % 2) return;": "column % 2 || (use == 2 && block == 1)) return;"
    }
}


@pytest.mark.parametrize("order", range(3))
def test_a_lost_word_is_an_error_that_names_its_block(order):
    """Block 1 does not store its words of the second x and the second h: epochs 3 and 4. There is
    one row, so that few lanes poll: the simulation counts their polls together.
    """
    message = (
        r"block \d+ \(warp group 0\) read a word of block 1 5000 times for epoch [34], and it is "
        r"still empty\. .*the CUDA context of this process is gone.* must be restarted"
    )
    with Simulated(build.library("plain", {**ONE, **FEW_POLLS, **LOST})) as kernels:
        kernels.device(sms=4)
        call = mogrifier((4, 1, 10, 18), BF16, rounds=5)
        with pytest.raises(RuntimeError, match=message):
            run(kernels, "mogrifier_lstm", order, *call, engine="words")
        kernels.forget_lost_wait()


# ---- the plan


def test_words_are_used_where_they_are_asked_for_and_fit():
    size = 70, 20, 650, 650, 5
    for direction in RESIDENT:
        found = plan(*size)[direction]
        assert found["words"]
        assert (found["columns_h"], found["columns_x"], found["blocks"]) == (6, 6, 109)
        assert not plan(*size, protocol="flags")[direction]["words"]
    for other in (
        (70, 20, 650, 649, 5),  # an odd number of units,
        (70, 20, 649, 650, 5),  # or of inputs, in rounds;
        (70, 80, 650, 650, 5),  # more rows than one group has,
        (70, 20, 1150, 1150, 5),  # weights in registers
    ):
        assert plan(*other)["persistent"]
        assert not any(plan(*other)[direction]["words"] for direction in RESIDENT)
    assert plan(70, 20, 649, 650, 0)["forward"]["words"]
    assert not plan(*size, element=4)["forward"]["words"]


@pytest.mark.parametrize("sms", [1, 3, 66, 108, 132, 148])
@pytest.mark.parametrize("size", [c[0] for c in CASES.values()], ids=list(CASES))
def test_blocks_own_even_numbers_of_columns(size, sms):
    _, _, X, H, rounds = size
    found = plan(*size, sms=sms)
    for direction in RESIDENT:
        layout = found[direction]
        if not layout["words"]:
            continue
        assert layout["columns_h"] % 2 == layout["columns_x"] % 2 == 0
        assert layout["replicas"] * layout["blocks"] <= sms
        assert (layout["blocks"] - 1) * layout["columns_h"] < H
        assert layout["blocks"] * layout["columns_h"] >= H
        assert not rounds or layout["blocks"] * layout["columns_x"] >= X
        assert layout["shared"] <= H200["shared"]


def test_the_protocol_takes_nothing_from_what_fits():
    """Where words do not fit, the plan is that of flags."""
    for size, _ in CASES.values():
        words, flags = plan(*size), plan(*size, protocol="flags")
        assert words["persistent"] == flags["persistent"]
        for direction in RESIDENT:
            assert words[direction]["slices"] == flags[direction]["slices"]
            assert words[direction]["words"] or words[direction] == flags[direction]


def test_the_estimate_keeps_flags():
    """Words save 11 % of an exchange by the estimate, which is less than it may be wrong by."""
    flags, words = _C.exchange_cycles("flags"), _C.exchange_cycles("words")
    assert 0.75 * flags < words < flags
    for size, _ in CASES.values():
        assert plan(*size, protocol="estimate") == plan(*size, protocol="flags")


def test_an_unknown_protocol_is_an_error():
    with pytest.raises(ValueError, match="protocol must be estimate, flags or words, got x"):
        plan(70, 20, 650, 650, 5, protocol="x")
