"""Two layers in one launch (csrc/cuda/recurrence/wavefront.cu) on a simulated GPU with few SMs.

Results and gradients are compared with the oracle, and bit for bit with two launches. Kernels with
one changed line must fail. Further: which sizes the plan accepts for a given GPU.
"""

import platform
import shutil

import pytest
import torch
from fusedseq import _C, reference, testing

from tests.simt import build
from tests.simt.memory import Simulated
from tests.simt.recurrence import operators
from tests.simt.test_simt_persistent import H200, ONE, SMALL
from tests.simt.test_simt_recurrence import OPTIONS, mogrifier

pytestmark = [
    pytest.mark.sampled_files("simulated GPU", 5),
    pytest.mark.skipif(
        platform.machine() != "x86_64" or not shutil.which(build.CXX),
        reason="tests/simt needs g++ on x86-64",
    ),
]
OP = "mogrifier_lstm_pair"
TENSORS = ("W_ih", "W_hh", "b", "h0", "c0", "Q", "R")
SIZES = [
    (1, 5, 3, 1, 4),
    (2, 2, 2, 3, 17),
    (5, 5, 9, 17, 6),
    (3, 20, 21, 17, 17),
    (2, 3, 40, 33, 40),
]  # T, B, X, H, H of layer 2


def pair(size, own, first=None, second=None):
    """first, second: options of `mogrifier` for each layer; the second may have input_dropout"""
    T, B, X, H, H2 = size
    (x, *tensors), options = mogrifier((T, B, X, H), own, **(first or {"rounds": 3}))
    (_, *others), of_second = mogrifier((T, B, H, H2), own, **(second or {"rounds": 2}))
    layers = (
        (tensors, options),
        ([1 - t if t is not None and t.dim() == 1 else t for t in others], of_second),
    )
    return (x, *(dict(zip(TENSORS, given, strict=True)) | more for given, more in layers)), {}


def check(path, args, kwargs, order=0, outputs=None, **gpu):
    with Simulated(path) as kernels:
        kernels.device(**{"sms": 8, **gpu})
        testing.check(OP, args, kwargs, function=operators(kernels, order)[OP], outputs=outputs)


@pytest.fixture(scope="module")
def libraries():
    return {mode: build.library(mode, SMALL) for mode in ("plain", "checked")}


# ---- the kernels


@pytest.mark.parametrize("own", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize("sms", [8, 11])
def test_two_layers(libraries, own, size, sms):
    check(libraries["plain"], *pair(size, own), order=sum(size), sms=sms)


DROPPED = {"rounds": 3, "input_dropout": 0.4, "locked_input": False}
LINKS = {
    "five rounds and one": ({"rounds": 5}, {"rounds": 1}),
    "one round and four": ({"rounds": 1}, {"rounds": 4}),
    "shared": ({"rounds": 5, "shared": True}, {"rounds": 4, "shared": True}),
    "low rank": ({"rounds": 5, "rank": 2}, {"rounds": 2}),
    "dropped between": ({"rounds": 2}, DROPPED),
    "locked between": ({"rounds": 2}, DROPPED | {"locked_input": True}),
    "nothing between": ({"rounds": 2}, DROPPED | {"input_dropout": 1.0}),
    "not training": ({"rounds": 2, "training": False}, DROPPED | {"training": False}),
    "everything dropped": (OPTIONS["dropped"], OPTIONS["dropped"] | DROPPED | {"seed": 9}),
    "lengths": (
        {"rounds": 2, "lengths": True},
        {"rounds": 2, "lengths": True, "cap_input_gate": True},
    ),
}


@pytest.mark.parametrize("options", LINKS)
@pytest.mark.parametrize("outputs", [None, (3,), (0, 4)], ids=str)
def test_options(libraries, options, outputs):
    check(
        libraries["plain"],
        *pair((4, 5, 9, 17, 12), torch.bfloat16, *LINKS[options]),
        order=7,
        outputs=outputs,
    )


def grads(outputs, leaves):
    return torch.autograd.grad([t.float().square().sum() for t in outputs], leaves)


@pytest.mark.parametrize("options", LINKS)
def test_one_launch_gives_the_bits_of_two(libraries, options):
    """Also in a different order of threads."""
    args, _ = pair((4, 5, 9, 17, 12), torch.bfloat16, *LINKS[options])
    found = []
    for one in (False, True):
        with Simulated(libraries["plain"]) as kernels:
            kernels.device(sms=8)
            ops = operators(kernels, 3 + one, "persistent")
            x, first, second = torch.utils._pytree.tree_map(
                lambda t: t.clone() if isinstance(t, torch.Tensor) else t, args
            )
            leaves = testing.differentiable((x, first, second), {})
            for leaf in leaves:
                leaf.requires_grad_()
            if one:
                (y, state), (y2, state2) = ops[OP](x, first, second)
            else:
                y, state = ops["mogrifier_lstm"](x, **first)
                p, locked = (second.pop(name, None) for name in ("input_dropout", "locked_input"))
                p = p if p and second.get("training", True) else 0.0
                drop = getattr(reference, "locked_dropout" if locked else "dropout")
                y2, state2 = ops["mogrifier_lstm"](
                    drop(y.float(), p, second["seed"]).to(y.dtype), **second
                )
            outputs = [y, *state, y2, *state2]
            found.append([*outputs, *grads(outputs, leaves)])
    for a, b in zip(*found, strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("order", range(1, 4))
@pytest.mark.parametrize("options", ["five rounds and one", "locked between", "everything dropped"])
def test_no_races_and_no_uninitialised_reads(libraries, options, order):
    check(
        libraries["checked"], *pair((3, 5, 9, 17, 12), torch.bfloat16, *LINKS[options]), order=order
    )


FIRST, LAST = "persistent_forward.cuh", "persistent_backward.cuh"
LAST_STEP = "persistent_backward_step.cuh"
DEFECTS = {  # file, old, new
    "no wait for y": (
        FIRST,
        "if (LINKED && p.link.flags && t < r.steps) g.wait(p.link, columns_x, t + 1, 1);",
        "",
    ),
    "an epoch early": (
        FIRST,
        "g.wait(p.link, columns_x, t + 1, 1)",
        "g.wait(p.link, columns_x, t + 1, 0)",
    ),
    "the last y is not released": (FIRST, "if (LINKED) publish(false);", ""),
    "another mask": (
        "persistent_forward_step.cuh",
        "masked(p.link, value, t, r.B, b, columns_h.first + j, r.H)",
        "masked(p.link, value, t, r.B, b, j, r.H)",
    ),
    "no wait for dx": (LAST_STEP, "g.wait(p.link, columns_h, r.steps - t, 0);", ""),
    "an epoch early, backward": (
        LAST_STEP,
        "g.wait(p.link, columns_h, r.steps - t, 0);",
        "g.wait(p.link, columns_h, r.steps - t, -1);",
    ),
    "the first dx is not released": (LAST, "if (LINKED) g.publish(++epoch);", ""),
    "the first's own dy is left out": (LAST_STEP, "b.dy ? float(S(dy[e] + d)) : d", "d"),
}


@pytest.mark.sampled(4)
@pytest.mark.parametrize("defect", DEFECTS)
def test_a_defect_fails(defect):
    file, old, new = DEFECTS[defect]
    call = pair((4, 5, 9, 17, 12), torch.bfloat16, {"rounds": 3}, DROPPED)
    path = build.library("plain", {**ONE, file: {old: new}})
    check(build.library("plain", ONE), *call, order=1)
    seen = 0
    for order in range(1, 6):
        try:
            check(path, *call, order=order)
        except (AssertionError, RuntimeError):
            seen += 1
    assert seen


def test_a_gpu_without_cooperative_launch_is_rejected(libraries):
    with pytest.raises(RuntimeError, match="no cooperative launch"):
        check(libraries["plain"], *pair(SIZES[2], torch.bfloat16), cooperative=False)


# ---- the plan


def plan(T=70, B=20, first=(650, 650, 5), second=(650, 650, 5), element=2, **gpu):
    gpu = H200 | gpu
    layers = ((X, H, rounds, (rounds + 1) // 2, rounds // 2) for X, H, rounds in (first, second))
    return _C.wavefront_plan(
        T, B, *layers, element, gpu["sms"], gpu["shared"], gpu["cooperative"], min(T, 4)
    )


def test_what_fits_an_h200():
    found = plan()
    assert found["persistent"]
    for layout in (*found["forward"], *found["backward"]):
        assert layout["blocks"] <= 66
        assert layout["columns_h"] == 10
        assert layout["shared"] <= H200["shared"]
    assert plan(first=(400, 650, 5))["persistent"]


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"first": (1150, 1150, 5), "second": (1150, 1150, 5)}, "half of the GPU holds"),
        ({"second": (650, 1150, 5)}, "half of the GPU holds"),
        ({"second": (650, 650, 0)}, "without rounds"),
        ({"first": (650, 650, 0)}, "without rounds"),
        ({"B": 33}, "32 rows"),
        ({"element": 4}, "bfloat16"),
        ({"sms": 1}, "half of the GPU holds"),
        ({"cooperative": False}, "cooperative"),
    ],
    ids=str,
)
def test_reasons_for_two_launches(change, why):
    found = plan(**change)
    assert not found["persistent"]
    assert why in found["why"]


@pytest.mark.parametrize("sms", [2, 7, 98, 108, 132, 148])
@pytest.mark.parametrize(
    ("first", "second"),
    [((650, 650, 5), (650, 650, 5)), ((400, 650, 2), (650, 300, 1)), ((3, 5, 1), (5, 1, 4))],
)
def test_a_layout_covers_each_column_and_row_once(first, second, sms):
    found = plan(first=first, second=second, sms=sms)
    for direction in ("forward", "backward"):
        for (X, H, _), layout in zip((first, second), found[direction], strict=True):
            if not found["persistent"]:
                continue
            assert layout["blocks"] <= sms // 2
            assert layout["replicas"] == layout["groups"] == 1
            assert layout["wide"]
            assert (
                (layout["blocks"] - 1) * layout["columns_h"]
                < H
                <= layout["blocks"] * layout["columns_h"]
            )
            assert layout["blocks"] * layout["columns_x"] >= X
            assert layout["rows"] == 20
