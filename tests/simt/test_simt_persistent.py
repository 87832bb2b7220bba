"""The persistent kernels of lstm and mogrifier_lstm on a simulated GPU with few multiprocessors.

Results and gradients are compared with the oracle, for every layout of the weights. Kernels with
one changed line must fail. Further: which layout the plan selects for a given size and GPU.
"""

import platform
import shutil

import pytest
import torch
from fusedseq import _C, testing

from tests.simt import build
from tests.simt.memory import Simulated
from tests.simt.recurrence import operators
from tests.simt.test_simt_recurrence import OPTIONS, lstm, mogrifier

pytestmark = [
    pytest.mark.sampled_files("simulated GPU", 5),
    pytest.mark.skipif(
        platform.machine() != "x86_64" or not shutil.which(build.CXX),
        reason="tests/simt needs g++ on x86-64",
    ),
]
TYPES = [torch.bfloat16, torch.float16, torch.float32]
RESIDENT = {"forward": "FORWARD_RESIDENT", "backward": "BACKWARD_RESIDENT"}
ONE_VARIANT = "Launch<{}>{{p, stream}}(Variant<1, 2, false>())"


def of_one_variant(*kinds):
    """The `changes` of build.library with which the kernels of these dtypes have one variant."""

    def choice(kind, resident):
        return f"with_variant<{0 if kind == 'float' else resident}>(l, Launch<{kind}>{{p, stream}})"

    return {
        f"persistent_{direction}.cu": {
            choice(kind, resident): ONE_VARIANT.format(kind) for kind in kinds
        }
        for direction, resident in RESIDENT.items()
    }


# One variant in fp16 shortens compilation: all variants are compiled in bf16, and nothing else
# differs.
SMALL = of_one_variant("__half")
H200 = {"sms": 132, "shared": 232448, "cooperative": True}


@pytest.fixture(scope="module")
def libraries():
    return {mode: build.library(mode, SMALL) for mode in ("plain", "checked")}


def on_gpu(kernels, op, order=0, engine="persistent"):
    """Returns the operator by the kernels of a library."""
    return operators(kernels, order, engine)[op]


def check(path, op, args, kwargs, order=0, engine="persistent", **gpu):
    with Simulated(path) as kernels:
        kernels.device(**{"sms": 4, **gpu})
        testing.check(op, args, kwargs, function=on_gpu(kernels, op, order, engine))


def plan(steps, B, X, H, rounds, on_x=None, on_h=None, element=2, **gpu):
    gpu = H200 | gpu
    on_x, on_h = (rounds + 1) // 2 if on_x is None else on_x, rounds // 2 if on_h is None else on_h
    return _C.recurrence_plan(
        steps,
        B,
        X,
        H,
        rounds,
        on_x,
        on_h,
        element,
        gpu["sms"],
        gpu["shared"],
        gpu["cooperative"],
        min(steps, 4),
    )


# ---- the kernels

SIZES = [(1, 5, 3, 1), (3, 2, 2, 3), (4, 5, 9, 17)]  # T, B, X, H


@pytest.mark.parametrize("own", TYPES, ids=str)
@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize(("bias", "lengths"), [(True, False), (False, True)])
def test_lstm(libraries, own, size, bias, lengths):
    check(libraries["plain"], "lstm", *lstm(size, own, bias, lengths), order=sum(size))


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


@pytest.mark.parametrize("variational", [False, True])
@pytest.mark.parametrize("p", [0.4, 1.0])
def test_weight_drop_is_applied_while_weights_are_loaded(libraries, p, variational):
    dropped = {"weight_drop": p, "variational": variational, "seed": 5}
    args, kwargs = lstm((3, 5, 9, 17), torch.bfloat16)
    check(libraries["plain"], "lstm", args, kwargs | dropped)
    args, kwargs = mogrifier((3, 5, 9, 17), torch.bfloat16, rounds=2)
    check(libraries["plain"], "mogrifier_lstm", args, kwargs | dropped)


# {layout: (rounds, (T, B, X, H), the GPU) for which the plan selects it}
LAYOUTS = {
    "several k-steps, 6 columns": (5, (2, 20, 70, 64), {"sms": 11}),
    "more blocks than inputs": (3, (2, 3, 3, 40), {"sms": 12}),
    "wide": (5, (2, 5, 50, 64), {"sms": 8}),
    "wide in x": (4, (2, 20, 30, 9), {"sms": 3}),
    "two groups": (3, (2, 33, 20, 33), {"sms": 6}),
    "two wide groups": (3, (2, 40, 33, 40), {"sms": 5}),
    "two groups, three tiles": (3, (2, 70, 20, 33), {"sms": 6}),
    "plain, 9 columns": (0, (2, 20, 20, 50), {"sms": 6, "shared": 24000}),
    "plain, 9 columns, two groups": (0, (2, 70, 20, 40), {"sms": 5}),
    "plain, 16 columns": (0, (3, 20, 20, 61), {"sms": 4}),
    "plain, 16 columns, two groups": (0, (2, 70, 20, 47), {"sms": 4}),
    "two replicas": (3, (2, 40, 20, 33), {"sms": 12}),
    "two replicas, two groups": (2, (2, 67, 9, 17), {"sms": 8}),
    "two slices": (2, (2, 99, 9, 17), {"sms": 3}),
    "two wide slices": (3, (2, 65, 33, 40), {"sms": 5}),
}
MADE = {  # slices, replicas, groups, tiles, wide, plain
    "several k-steps, 6 columns": (1, 1, 1, 2, False, 0),
    "more blocks than inputs": (1, 1, 1, 2, False, 0),
    "wide": (1, 1, 1, 2, True, 0),
    "wide in x": (1, 1, 1, 2, True, 0),
    "two groups": (1, 1, 2, 3, False, 0),
    "two wide groups": (1, 1, 2, 2, True, 0),
    "two groups, three tiles": (1, 1, 2, 3, False, 0),
    "plain, 9 columns": (1, 1, 1, 2, True, 9),
    "plain, 9 columns, two groups": (1, 1, 2, 3, True, 9),
    "plain, 16 columns": (1, 1, 1, 2, True, 16),
    "plain, 16 columns, two groups": (1, 1, 2, 3, True, 16),
    "two replicas": (1, 2, 1, 2, False, 0),
    "two replicas, two groups": (1, 2, 2, 3, False, 0),
    "two slices": (2, 1, 2, 3, False, 0),
    "two wide slices": (2, 1, 2, 2, True, 0),
}
FACTS = ("slices", "replicas", "groups", "tiles", "wide", "plain")


@pytest.mark.parametrize("own", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout(libraries, layout, own):
    rounds, (T, B, X, H), gpu = LAYOUTS[layout]
    found = plan(T, B, X, H, rounds, element=own.itemsize, **gpu)
    if own == torch.float32 and "plain" in layout:
        assert not any(found[direction]["plain"] for direction in RESIDENT)
        return
    for direction in RESIDENT:
        assert tuple(found[direction][name] for name in FACTS) == MADE[layout]
    size = T, B, X, H
    if rounds:
        check(
            libraries["plain"],
            "mogrifier_lstm",
            *mogrifier(size, own, rounds, state_dropout=0.3),
            order=1,
            **gpu,
        )
    else:
        check(libraries["plain"], "lstm", *lstm(size, own), order=1, **gpu)


def bits(path, args, kwargs, order, **gpu):
    """Returns y and the gradients of a call of mogrifier_lstm."""
    with Simulated(path) as kernels:
        kernels.device(**gpu)
        leaves = [t.clone().requires_grad_() for t in args]
        y, _ = operators(kernels, order, "persistent")["mogrifier_lstm"](*leaves, **kwargs)
        return [y, *torch.autograd.grad(y.float().square().sum(), leaves)]


def test_slices_give_the_bits_of_one_launch(libraries):
    """Two slices, or two copies of the weights: both have 50 rows and 49 rows with the same split
    of K. Every random mask is of the whole batch.
    """
    size, rounds = (2, 99, 9, 17), 3
    options = {"state_dropout": 0.3, "zoneout_h": 0.2, "zoneout_c": 0.1, "weight_drop": 0.4}
    args, kwargs = mogrifier(size, torch.bfloat16, rounds, seed=5, **options)
    found = {sms: plan(*size, rounds, sms=sms) for sms in (3, 6)}
    for direction in RESIDENT:
        assert [found[3][direction][name] for name in ("slices", "replicas", "rows")] == [2, 1, 50]
        assert [found[6][direction][name] for name in ("slices", "replicas", "rows")] == [1, 2, 50]
    sliced, whole = (bits(libraries["plain"], args, kwargs, sms, sms=sms) for sms in (3, 6))
    for one, other in zip(sliced, whole, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("own", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("engine", ["loop, persistent", "persistent, loop"])
def test_forward_and_backward_can_have_different_implementations(libraries, engine, own):
    """What one saves the other reads: padding is uninitialized, and would show as NaN."""
    options = OPTIONS["dropped"]
    check(
        libraries["plain"],
        "mogrifier_lstm",
        *mogrifier((3, 5, 9, 17), own, **options),
        engine=engine,
    )
    check(libraries["plain"], "lstm", *lstm((3, 5, 9, 17), own, True, True), engine=engine)


def test_weights_in_registers(libraries):
    T, B, X, H, rounds, sms = 1, 3, 912, 912, 2, 100
    small = {"sms": sms, "shared": 190000}
    layouts = plan(T, B, X, H, rounds, **small)
    assert layouts["persistent"]
    assert layouts["forward"]["resident"]
    assert layouts["backward"]["resident"]
    check(
        libraries["plain"],
        "mogrifier_lstm",
        *mogrifier((T, B, X, H), torch.bfloat16, rounds),
        **small,
    )


@pytest.mark.parametrize("options", [None, "five rounds", "dropped", "low rank, shared"])
@pytest.mark.parametrize(
    ("own", "order"), [(torch.bfloat16, 1), (torch.bfloat16, 2), (torch.float32, 3)], ids=str
)
def test_no_races_and_no_uninitialised_reads(libraries, options, own, order):
    if options:
        call = "mogrifier_lstm", *mogrifier((3, 5, 9, 17), own, **OPTIONS[options])
    else:
        call = "lstm", *lstm((3, 5, 9, 17), own)
    check(libraries["checked"], *call, order=order)


@pytest.mark.parametrize(
    ("direction", "start", "least", "most"),
    [
        # Neighbouring threads load a row of the eight columns that a block owns: of four rows.
        ("backward", "return w_ih[(int64_t(k % 4)", 4, 5),
        # They load a row of W_ih: 64 neighbouring bytes, in two sectors or, unaligned, three.
        ("forward", "return w_ih[(int64_t(n % 4)", 2, 3),
    ],
    ids=["backward", "forward"],
)
def test_weights_are_loaded_from_neighbouring_addresses(libraries, direction, start, least, most):
    """W_ih, by each warp in as few sectors of global memory as possible; an element by itself would
    take 32."""
    file = f"persistent_{direction}.cuh"
    text = (build.ROOT / "csrc/cuda/recurrence" / file).read_text()
    line = f"{file}:{text[: text.index(start)].count(chr(10)) + 1}"
    args, kwargs = mogrifier((4, 2, 64, 64), torch.bfloat16, rounds=2)
    with Simulated(libraries["checked"]) as kernels:
        kernels.device(sms=8)
        kernels.library.simt_count_requests(True)
        testing.check("mogrifier_lstm", args, kwargs, function=on_gpu(kernels, "mogrifier_lstm"))
        found = kernels.sectors_of_request(line)
        kernels.library.simt_count_requests(False)
    assert least <= found <= most


def test_two_runs_give_the_same_bits(libraries):
    args, kwargs = mogrifier((4, 5, 9, 17), torch.bfloat16, rounds=5)
    runs = (bits(libraries["plain"], args, kwargs, order, sms=4) for order in (3, 8))
    for first, second in zip(*runs, strict=True):
        assert torch.equal(first, second)


def test_a_gpu_without_cooperative_launch_is_rejected(libraries):
    with pytest.raises(RuntimeError, match="no cooperative launch"):
        check(libraries["plain"], "lstm", *lstm((4, 5, 9, 17), torch.bfloat16), cooperative=False)


# One variant shows the defects and compiles fast.
ONE = of_one_variant("__half", "__nv_bfloat16", "float")
MOGRIFIER = mogrifier((4, 5, 9, 17), torch.bfloat16, rounds=5)
DEFECTS = {  # file, old, new, a call that shows it and on how many SMs
    "no barrier before the flag": (
        "persistent_group.cuh",
        "    sync();\n    if (thread == 0) ptx::store_release",
        "    if (thread == 0) ptx::store_release",
        *MOGRIFIER,
        4,
    ),
    "no wait": (
        "persistent_group.cuh",
        "ptx::load_acquire(a.flags + p)) - epoch) < 0",
        "ptx::load_acquire(a.flags + p)) - epoch) < -9999",
        *MOGRIFIER,
        4,
    ),
    "one slot": (
        "persistent_exchange.cuh",
        "constexpr int SLOTS = 4;",
        "constexpr int SLOTS = 1;",
        *lstm((5, 5, 9, 17), torch.bfloat16),
        4,
    ),
    "half of the bits of fp32": (
        "persistent_products.cuh",
        "rows[4] = {a[m].x,",
        "rows[4] = {a[m].x & 0xffff0000u,",
        *lstm((5, 5, 9, 17), torch.float32),
        4,
    ),
    "rows of another replica": (
        "persistent_group.cuh",
        "slice.first + replica * int(l.rows)",
        "slice.first",
        *mogrifier((2, 40, 9, 17), torch.bfloat16, rounds=2),
        12,
    ),
}


@pytest.mark.sampled(4)
@pytest.mark.parametrize("defect", DEFECTS)
def test_a_defect_fails(defect):
    file, old, new, args, kwargs, sms = DEFECTS[defect]
    path = build.library("plain", {**ONE, file: {old: new}})
    op = "mogrifier_lstm" if "rounds" in kwargs else "lstm"
    check(build.library("plain", ONE), op, args, kwargs, order=1, sms=sms)
    seen = 0
    for order in range(1, 6):
        try:
            check(path, op, args, kwargs, order=order, sms=sms)
        except (AssertionError, RuntimeError):
            seen += 1
    assert seen


# ---- the plan

CASES = {  # (steps, B, X, H, rounds), whether the persistent kernels run
    "650": ((70, 20, 650, 650, 5), True),
    "650, B 80": ((70, 80, 650, 650, 5), True),
    "912 multiplied out": ((70, 64, 912, 912, 5), True),
    "1150": ((70, 20, 1150, 1150, 5), True),
    "1150, B 80": ((70, 80, 1150, 1150, 5), True),
    "1150, B 160": ((70, 160, 1150, 1150, 5), False),
    "1150 plain": ((70, 20, 1150, 1150, 0), True),
    "1150 plain, B 80": ((70, 80, 1150, 1150, 0), True),
    "first layer of AWD": ((70, 20, 400, 1150, 5), True),
    "last layer of AWD": ((70, 20, 1150, 400, 0), True),
    "1500 with rounds": ((70, 20, 1500, 1500, 5), False),
    "1500 plain": ((70, 20, 1500, 1500, 0), True),
    "128, B 256": ((70, 256, 128, 128, 0), True),
    "650, B 512": ((70, 512, 650, 650, 5), True),
    "650, B 513": ((70, 513, 650, 650, 5), False),
    "768 plain, B 384": ((70, 384, 768, 768, 0), True),
    "one unit": ((70, 1, 1, 1, 1), True),
}


@pytest.mark.parametrize("case", CASES)
def test_what_fits_an_h200(case):
    size, persistent = CASES[case]
    assert plan(*size)["persistent"] is persistent


FP32 = {  # the same in fp32
    "650": ((70, 20, 650, 650, 5), True),
    "650, B 80": ((70, 80, 650, 650, 5), True),
    "912 multiplied out": ((70, 20, 912, 912, 5), False),
    "1150 plain": ((70, 20, 1150, 1150, 0), True),
    "1150 plain, B 80": ((70, 80, 1150, 1150, 0), True),
    "last layer of AWD": ((70, 20, 1150, 400, 0), True),
    "256": ((70, 64, 256, 256, 5), True),
}


@pytest.mark.parametrize("case", FP32)
def test_what_fits_an_h200_in_fp32(case):
    size, persistent = FP32[case]
    found = plan(*size, element=4)
    assert found["persistent"] is persistent
    assert not (persistent and found["forward"]["resident"])


@pytest.mark.parametrize("sms", [1, 3, 66, 98, 108, 114, 132, 148])
@pytest.mark.parametrize("size", [c[0] for c in CASES.values()], ids=list(CASES))
def test_a_layout_covers_each_column_and_row_once(size, sms):
    _, B, X, H, rounds = size
    found = plan(*size, sms=sms)
    for direction in ("forward", "backward"):
        layout = found[direction]
        if not layout["blocks"]:
            continue
        assert layout["replicas"] * layout["blocks"] <= sms
        assert layout["shared"] <= H200["shared"]
        assert (
            (layout["blocks"] - 1) * layout["columns_h"]
            < H
            <= layout["blocks"] * layout["columns_h"]
        )
        assert not rounds or layout["blocks"] * layout["columns_x"] >= X
        assert layout["rows"] <= layout["groups"] * layout["tiles"] * 16
        rows, slices = layout["slice_rows"], layout["slices"]
        assert (slices - 1) * rows < B <= slices * rows
        assert rows <= layout["replicas"] * layout["rows"] < rows + layout["replicas"]


A100 = {"sms": 108, "shared": 166912}
SMALL_SHARED = {"shared": 101376}  # of a block on the GPUs of consumers


def test_sizes_that_need_few_bytes_more():
    """AWD-LSTM's H 1150 without rounds, on an A100 in 11 columns, on an RTX 4090 and an L40S to the
    byte, and the size that only one direction of an A100 has room for.
    """
    size = 70, 20, 1150, 1150, 0
    assert plan(*size, **A100)["forward"]["plain"] == 16
    for sms in (128, 142):
        found = plan(*size, sms=sms, **SMALL_SHARED)
        assert found["persistent"]
        assert found["forward"]["shared"] == SMALL_SHARED["shared"]
    found = plan(70, 20, 768, 768, 5, **A100)
    assert found["why"].startswith("only in backward")
    assert [bool(found[direction]["blocks"]) for direction in RESIDENT] == [False, True]


def test_reasons_for_the_loop():
    size = 70, 20, 650, 650, 5
    assert "float32" in plan(*size, element=8)["why"]
    assert "cooperative" in plan(*size, cooperative=False)["why"]
    assert "1 GiB" in plan(20000, 20, 650, 650, 0)["why"]
    assert "steps" in _C.recurrence_plan(3, *size[1:], 3, 2, 2, 132, 232448, True)["why"]
    assert "hold" in plan(*size, sms=20)["why"]
    assert "hold" in plan(70, 4096, 650, 650, 5)["why"]


def test_shared_rounds_need_less_memory():
    assert (
        plan(70, 20, 650, 650, 5, 1, 1)["forward"]["shared"]
        < plan(70, 20, 650, 650, 5)["forward"]["shared"]
    )
