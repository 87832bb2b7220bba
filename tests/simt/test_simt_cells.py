"""The persistent kernels of persistent_cells.cu on a simulated GPU with few multiprocessors: the
peephole LSTM, the GRU, and LSTMs with `starts` or in reverse.

Results and gradients are compared with the oracle, for every layout of the weights. Kernels with
one changed line must fail. Further: which layout the plan selects for a given size and GPU.
"""

import platform
import shutil

import pytest
import torch
from fusedseq import _C

from tests.simt import build
from tests.simt.test_simt_persistent import H200, SMALL, check
from tests.simt.test_simt_recurrence import CELL_OPTIONS, ORDERS, ZONEOUT, lstm, mogrifier, of_cell

pytestmark = [
    pytest.mark.sampled_files("simulated GPU", 5),
    pytest.mark.skipif(
        platform.machine() != "x86_64" or not shutil.which(build.CXX),
        reason="tests/simt needs g++ on x86-64",
    ),
]
TYPES = [torch.bfloat16, torch.float16, torch.float32]
CELLS = ["lstm", "peephole_lstm", "gru"]
GATES = {"lstm": 4, "peephole_lstm": 4, "gru": 3}
SIZES = [(1, 5, 3, 1), (3, 2, 2, 3), (4, 5, 9, 17)]  # T, B, X, H


@pytest.fixture(scope="module")
def libraries():
    return {mode: build.library(mode, SMALL) for mode in ("plain", "checked")}


def call_of(op, size, own, **options):
    """An operator's name and inputs. An LSTM with the options of CELL_OPTIONS is a Mogrifier LSTM
    without rounds, and has `starts` or is in reverse, since the kernels of persistent_forward.cuh
    compute the others.
    """
    if op != "lstm":
        return op, *of_cell(op, size, own, **options)
    if not (options.get("starts") or options.get("reverse")):
        options = options | {"starts": True}
    return "mogrifier_lstm", *mogrifier(size, own, 0, **options)


def plan(op, T, B, X, H, element=2, **gpu):
    gpu = H200 | gpu
    return _C.recurrence_plan(
        T,
        B,
        X,
        H,
        *(0, 0, 0, element),
        *(gpu["sms"], gpu["shared"], gpu["cooperative"]),
        min(T, 4),
        gates=GATES[op],
        cells=True,
    )


# ---- the kernels


@pytest.mark.parametrize("own", TYPES, ids=str)
@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize("options", CELL_OPTIONS, ids=str)
@pytest.mark.parametrize("op", CELLS)
def test_cells(libraries, op, own, size, options):
    check(libraries["plain"], *call_of(op, size, own, **options), order=sum(size))


@pytest.mark.parametrize("options", ORDERS, ids=str)
def test_lstm_in_another_order(libraries, options):
    """Of the operator `lstm` itself, with a weight drop."""
    drop = {"weight_drop": 0.5, "seed": 7}
    inputs = lstm((4, 5, 9, 17), torch.bfloat16, **options, **drop)
    check(libraries["plain"], "lstm", *inputs, order=2)


@pytest.mark.parametrize("own", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("options", [*ORDERS, {"starts": True, "cap_input_gate": True}], ids=str)
def test_state_dropout_and_a_capped_input_gate(libraries, options, own):
    inputs = mogrifier((4, 5, 9, 17), own, 0, state_dropout=0.4, zoneout_h=0.3, **options)
    check(libraries["plain"], "mogrifier_lstm", *inputs, order=2)


# {layout: ((T, B, X, H), the GPU) for which the plan selects it}
LAYOUTS = {
    "several k-steps, 6 columns": ((2, 20, 9, 64), {"sms": 11}),
    "wide": ((2, 20, 9, 64), {"sms": 7}),
    "two groups": ((2, 70, 9, 18), {"sms": 3}),
    "two wide groups": ((2, 40, 9, 40), {"sms": 5}),
    "16 columns": ((3, 20, 9, 61), {"sms": 4}),
    "two replicas": ((2, 40, 9, 33), {"sms": 12}),
    "two slices": ((2, 99, 9, 17), {"sms": 3}),
}
FACTS = ("slices", "replicas", "groups", "tiles", "wide", "plain")
MADE = {  # those facts in 16 bits
    "several k-steps, 6 columns": (1, 1, 1, 2, False, 0),
    "wide": (1, 1, 1, 2, True, 16),
    "two groups": (1, 1, 2, 3, False, 0),
    "two wide groups": (1, 1, 2, 3, True, 16),
    "16 columns": (1, 1, 1, 2, True, 16),
    "two replicas": (1, 2, 1, 2, False, 0),
    "two slices": (2, 1, 2, 3, False, 0),
}
IN_FP32 = MADE | {"wide": (1, 1, 1, 2, True, 0), "two wide groups": (1, 1, 2, 2, True, 0)}
del IN_FP32["16 columns"]


@pytest.mark.parametrize("own", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("op", CELLS)
def test_every_layout(libraries, op, layout, own):
    (T, B, X, H), gpu = LAYOUTS[layout]
    found = plan(op, T, B, X, H, element=own.itemsize, **gpu)
    made = (MADE if own.itemsize == 2 else IN_FP32).get(layout)
    for direction in ("forward", "backward"):
        assert bool(found[direction]["blocks"]) == bool(made)
        assert not made or tuple(found[direction][name] for name in FACTS) == made
    if made:
        inputs = call_of(op, (T, B, X, H), own, lengths=True, starts=True, reverse=True)
        check(libraries["plain"], *inputs, order=1, **gpu)


@pytest.mark.parametrize("own", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("engine", ["loop, persistent", "persistent, loop"])
@pytest.mark.parametrize("op", CELLS)
def test_forward_and_backward_can_have_different_implementations(libraries, op, engine, own):
    """What one saves the other reads: padding is uninitialized, and would show as NaN."""
    inputs = call_of(op, (3, 5, 9, 17), own, **ZONEOUT, lengths=True, starts=True, reverse=True)
    check(libraries["plain"], *inputs, engine=engine)


@pytest.mark.parametrize("options", [{}, *ORDERS], ids=str)
@pytest.mark.parametrize(
    ("own", "order"), [(torch.bfloat16, 1), (torch.bfloat16, 2), (torch.float32, 3)], ids=str
)
@pytest.mark.parametrize("op", CELLS)
def test_no_races_and_no_uninitialised_reads(libraries, op, options, own, order):
    inputs = call_of(op, (3, 5, 9, 17), own, **options, **ZONEOUT)
    check(libraries["checked"], *inputs, order=order)


def test_rounds_with_starts_are_the_loops(libraries):
    inputs = mogrifier((4, 5, 9, 17), torch.bfloat16, 2, starts=True)
    with pytest.raises(RuntimeError, match="with rounds have neither `starts` nor `reverse`"):
        check(libraries["plain"], "mogrifier_lstm", *inputs)


@pytest.mark.parametrize("op", ["rnn", "layer_norm_lstm", "layer_norm_gru"])
def test_other_cells_are_the_loops(libraries, op):
    inputs = of_cell(op, (4, 5, 9, 17), torch.bfloat16)
    with pytest.raises(RuntimeError, match="have the cells of LSTM, peephole LSTM and GRU"):
        check(libraries["plain"], op, *inputs)


LAST = {"lengths": True, "starts": True, "reverse": True}
DEFECTS = {  # file, old text, new text, operator, options of the call that shows it
    "no reset of h": (
        "persistent_cells_forward.cuh",
        "    if (reset >> e & 1) h[e] = 0;\n",
        "",
        "gru",
        LAST,
    ),
    "no reset of c": (
        "persistent_cells_forward.cuh",
        "  if (reset >> e & 1) c[e] = 0;\n  float",
        "  float",
        "lstm",
        LAST,
    ),
    "gradient into a zeroed h": (
        "persistent_cells_backward.cuh",
        "      if (zeroed >> e & 1) dh[e] = 0;\n",
        "",
        "gru",
        LAST,
    ),
    "gradient into a zeroed c": (
        "persistent_cells_backward.cuh",
        "reset >> e & 1 ? 0.f : past_c + d_c",
        "past_c + d_c",
        "lstm",
        LAST,
    ),
    "forward order": (
        "persistent_cells_forward.cuh",
        "const int64_t t = nth_step(r, n);",
        "const int64_t t = n;",
        "peephole_lstm",
        LAST,
    ),
    "mask of the step in memory": (
        "persistent_cells_forward.cuh",
        "mask_row(r, t, b)",
        "t * r.B + b",
        "gru",
        LAST | ZONEOUT,
    ),
    "no lengths": (
        "persistent_cells_backward.cuh",
        "!has_ended(r.lengths, t, i)",
        "true",
        "peephole_lstm",
        {"lengths": True},
    ),
    "terms of another unit": (
        "persistent_cells_backward.cuh",
        "to[term * int(r.H)] = S(terms[term]);",
        "to[term * int(r.H)] = S(terms[0]);",
        "peephole_lstm",
        {},
    ),
    "rows of W_hh": (
        "persistent_cells.cuh",
        "int64_t(n % GATES) * H",
        "int64_t((n + 1) % GATES) * H",
        "gru",
        {},
    ),
    "epoch of the newest vector": (
        "persistent_cells_forward.cuh",
        "p.h, epoch, epoch,",
        "p.h, epoch, epoch - 1,",
        "gru",
        {},
    ),
}


@pytest.mark.sampled(4)
@pytest.mark.parametrize("defect", DEFECTS)
def test_a_defect_fails(defect):
    file, old, new, op, options = DEFECTS[defect]
    path = build.library("plain", {**SMALL, file: {old: new}})
    inputs = call_of(op, (6, 5, 9, 17), torch.bfloat16, **options)
    seen = 0
    for order in range(1, 6):
        try:
            check(path, *inputs, order=order)
        except (AssertionError, RuntimeError):
            seen += 1
    assert seen


# ---- the plan

CASES = {  # (op, (steps, B, X, H)), whether the persistent kernels run on an H200
    "gru, 650": (("gru", (70, 20, 650, 650)), True),
    "gru, 1150": (("gru", (70, 20, 1150, 1150)), True),
    "gru, 1500": (("gru", (70, 20, 1500, 1500)), True),
    "gru, 2048": (("gru", (70, 20, 2048, 2048)), True),
    "lstm, 1500": (("lstm", (70, 20, 1500, 1500)), True),
    "lstm, 2048": (("lstm", (70, 20, 2048, 2048)), False),
    "peephole_lstm, 650, B 80": (("peephole_lstm", (70, 80, 650, 650)), True),
}


@pytest.mark.parametrize("case", CASES)
def test_what_fits_an_h200(case):
    (op, size), persistent = CASES[case]
    assert plan(op, *size)["persistent"] is persistent


@pytest.mark.parametrize("element", [2, 4])
@pytest.mark.parametrize("sms", [1, 3, 66, 108, 132, 148])
@pytest.mark.parametrize("case", CASES)
def test_what_the_plan_selects_fits(case, sms, element):
    """The limits of the compiled variants, and the shared memory of a block."""
    (op, (T, B, X, H)), _ = CASES[case]
    found = plan(op, T, B, X, H, element, sms=sms)
    for direction in ("forward", "backward"):
        layout = found[direction]
        if not layout["blocks"]:
            continue
        most = 16 if layout["plain"] else 10 if layout["wide"] else 6
        assert layout["blocks"] * layout["replicas"] <= sms
        assert layout["columns_h"] <= most
        assert layout["blocks"] * layout["columns_h"] >= H
        assert layout["rows"] <= 16 * layout["tiles"] * layout["groups"]
        assert layout["shared"] <= H200["shared"]
        assert not any(layout[name] for name in ("words", "resident"))
        assert layout["plain"] == (16 if element == 2 and layout["wide"] else 0)
