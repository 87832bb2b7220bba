"""PTX with one change must fail: the tests of the translated kernels detect faults of compiled
code.

Also: what differs between the PTX for sm_80 and for sm_90a.
"""

import platform
import re
import shutil
from itertools import zip_longest

import pytest
import torch
from fusedseq import reference
from torch.utils._pytree import tree_map_only

from tests.ptx import build
from tests.simt import build as simt
from tests.simt.memory import Simulated
from tests.simt.recurrence import operators
from tests.simt.test_simt_persistent import check
from tests.simt.test_simt_recurrence import OPTIONS, mogrifier

pytestmark = [
    pytest.mark.sampled_files("PTX", 5),
    pytest.mark.skipif(
        platform.machine() != "x86_64" or not shutil.which(simt.CXX),
        reason="tests/simt needs g++ on x86-64",
    ),
    pytest.mark.skipif(not build.nvcc(), reason="nvcc is not found"),
]
BF16 = torch.bfloat16
# The persistent kernels in bf16 with the first variant, and all that their calls need besides.
VARIANT = "kernelI13__nv_bfloat16NS0_7VariantILi1ELi2ELb0ELi0ELi0E"
FLAGS, WORDS = f"{VARIANT}Lb0E", f"{VARIANT}Lb1E"
FEW = rf"(masked_copy|operands|sums)_kernelI13__nv_b|{FLAGS}"
FEW_WITH_WORDS = rf"(masked_copy|operands|sums)_kernelI13__nv_b|{WORDS}"
NAME = f"persistent_forward_{FLAGS}"
NAME_WITH_WORDS = f"persistent_forward_{WORDS}"


def mutation(change, name=NAME):
    """The function for build.library that changes the text of a forward kernel."""

    def mutate(file, text):
        if file != "persistent_forward.cu":
            return text
        before, entry, after = re.split(
            rf"(\.entry \w*{name}.*?(?=\n\.entry|\Z))", text, flags=re.S
        )
        changed = change(entry)
        assert changed != entry
        return before + changed + after

    return mutate


def replaced(old, new, count=0):
    return lambda entry: re.sub(old, new, entry, count=count, flags=re.S)


def with_swapped_fragments(number=None):
    """Swaps the second and the third register of a: in one mma, or in all."""

    def change(entry):
        seen = -1

        def swap(found):
            nonlocal seen
            seen += 1
            a = found[2].split(", ")
            if number is None or seen == number:
                a[1], a[2] = a[2], a[1]
            return found[1] + ", ".join(a)

        return re.sub(r"(mma\.sync\S+ \{[^}]*\}, \{)([^}]*)", swap, entry)

    return change


BARRIER = r"bar\.sync \t?[^;]*;"
MUTANTS = {
    "release made relaxed": replaced(r"st\.release\.gpu", "st.relaxed.gpu"),
    "acquire made relaxed": replaced(r"ld\.acquire\.gpu", "ld.relaxed.gpu"),
    "no barrier before the flags": replaced(rf"{BARRIER}((?:(?!bar\.sync).)*?st\.release)", r"\1"),
    "no barrier between the partial sums": replaced(
        rf"{BARRIER}((?:(?!bar\.sync).)*?{BARRIER}(?:(?!bar\.sync).)*?st\.release)", r"\1"
    ),
    "no __syncwarp": replaced(r"bar\.warp\.sync[^;]*;", ""),
    "fragments swapped": with_swapped_fragments(),
    "wrong immediate": replaced(r"(ld\.shared\.f32[^;]*)\+1024\]", r"\1+2048]", count=1),
}
CALL = mogrifier((4, 5, 9, 17), BF16, **OPTIONS["dropped"])
# Several k-steps, so that more than the first warps have partial sums.
LARGER = mogrifier((2, 20, 70, 64), BF16, 5)


def fails(path, call, order, sms=4, engine="persistent"):
    try:
        check(path, "mogrifier_lstm", *call, order=order, sms=sms, engine=engine)
    except (AssertionError, RuntimeError) as error:
        return "not translated" not in str(error)
    return False


def test_the_kernels_without_a_mutation_pass():
    path = build.library("plain", "sm_90a", FEW)
    assert not any(fails(path, CALL, order) for order in (1, 2))
    assert not fails(path, LARGER, order=1, sms=11)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("mutant", MUTANTS)
def test_a_mutant_fails(mutant):
    path = build.library("plain", "sm_90a", FEW, mutation(MUTANTS[mutant]))
    assert any(fails(path, CALL, order) for order in range(1, 7)) or fails(path, LARGER, 1, 11)


# The same kernel with words in place of flags. Every slot of a vector is used again.
STORE = r"st\.relaxed\.gpu\.global\.b32[^;]*;"
FULL = r"selp\.b32 \t%r\d+, -2147450880"  # a word that is about to be stored
WORD_MUTANTS = {
    "no reset": replaced(
        rf"({FULL}(?:(?!st\.relaxed).)*{STORE}(?:(?!st\.relaxed).)*){STORE}", r"\1"
    ),
    "no fence": replaced(r"fence\.acq_rel\.gpu;", ""),
    "zeros are empty": replaced(r"(selp\.b32 \t%r\d+, )-2147450880", r"\g<1>0"),
    "no barrier between the partial sums": replaced(r"bar\.sync \t?[^;]*;", ""),
    "fragments swapped": with_swapped_fragments(),
}
WORD_CALL = mogrifier((12, 5, 10, 18), BF16, 5, state_dropout=0.4)


def test_the_kernels_with_words_pass_without_a_mutation():
    path = build.library("plain", "sm_90a", FEW_WITH_WORDS)
    assert not any(fails(path, WORD_CALL, order, engine="words") for order in (1, 2))


@pytest.mark.sampled(4)
@pytest.mark.parametrize("mutant", WORD_MUTANTS)
def test_a_mutant_with_words_fails(mutant):
    change = mutation(WORD_MUTANTS[mutant], NAME_WITH_WORDS)
    path = build.library("plain", "sm_90a", FEW_WITH_WORDS, change)
    assert any(fails(path, WORD_CALL, order, engine="words") for order in range(1, 5))


def test_a_lost_block_ends_in_a_trap():
    """Without any release the blocks wait for ever; the bound on their polls is made smaller."""

    def change(entry):
        entry = replaced(r"st\.release[^;]*;", "")(entry)
        return replaced(r", 67108864;", ", 5000;")(entry)

    path = build.library("plain", "sm_90a", FEW, mutation(change))
    message = r"read the flag of block \d .* for epoch 1, and it shows epoch 0.*must be restarted"
    with pytest.raises(RuntimeError, match=message):
        check(path, "mogrifier_lstm", *CALL, order=1, sms=4)


@pytest.mark.parametrize(
    ("mutant", "message"),
    [
        ("no barrier between the partial sums", "(race on|uninitialized) shared memory"),
        ("no barrier before the flags", "race on global memory"),
    ],
)
def test_the_checked_build_reports_the_line_of_the_ptx(mutant, message):
    path = build.library("checked", "sm_90a", FEW, mutation(MUTANTS[mutant]))
    with pytest.raises(RuntimeError, match=rf"{message}.*persistent_forward\.ptx:\d+"):
        check(path, "mogrifier_lstm", *CALL, order=1)


# The mma of the fifth of six k-steps that are unrolled in a round: the small sizes have fewer.
COPY = 8


@pytest.mark.slow
def test_a_fault_in_one_unrolled_copy_shows_at_a_size_of_production_only():
    """The same size without the fault is in test_ptx_recurrence.py; here only forward runs."""
    path = build.library("plain", "sm_90a", FEW, mutation(with_swapped_fragments(COPY)))
    assert not any(fails(path, CALL, order) for order in (1, 2))
    args, kwargs = mogrifier((1, 20, 650, 650), BF16, 5)
    with Simulated(path) as kernels, torch.no_grad():
        kernels.device(sms=132)
        y, _ = operators(kernels, 1, "persistent")["mogrifier_lstm"](*args, **kwargs)
    wanted, _ = reference.mogrifier_lstm(
        *tree_map_only(torch.Tensor, torch.Tensor.double, args),
        **tree_map_only(torch.Tensor, torch.Tensor.double, kwargs),
    )
    budget = 0.05  # of bf16, times wanted's scale of 1; the fault changes y by more
    assert (y.double() - wanted).abs().max() > budget


# ---- sm_80 and sm_90a

CONVERSION = re.compile(
    r"\{ (?:mov\.b32 (%f\d+), \{0,(%rs\d+)\};|cvt\.f32\.bf16 (%f\d+), (%rs\d+);)\}"
)


def comparable(text):
    """The lines of a module without its target, the hashes in its names and comments."""
    text = build.ANONYMOUS.sub(
        "", re.sub(r"_[0-9a-f]{8}(?=_\d+_\w+_cu_)|(?<=_cu_)[0-9a-f]{8}", "", text)
    )
    text = re.sub(r"//[^\n]*|\.target[^\n]*", "", text)
    return [CONVERSION.sub(r"bf16 \1\3 \2\4", line.strip()) for line in text.split("\n")]


@pytest.mark.parametrize("source", build.SOURCES, ids=lambda path: path.name)
def test_sm_80_and_sm_90a_differ_in_conversions_of_bf16_only(source):
    """sm_80 moves the 16 bits into the upper half of a register, where sm_90a has a conversion."""
    pairs = zip_longest(*(comparable(build.ptx(source, gpu)) for gpu in build.GPUS))
    assert [pair for pair in pairs if pair[0] != pair[1]][:5] == []
