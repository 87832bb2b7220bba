"""The persistent kernels in clusters of two blocks, on a simulated GPU with few multiprocessors:
results and gradients are compared with the oracle, kernels with one changed line must fail, a lost
block is reported, and a launch that does not fit is refused. Further: when the plan has clusters.
"""

import platform
import shutil

import pytest
import torch
from fusedseq import _C

from tests.simt import build
from tests.simt.memory import Simulated
from tests.simt.test_simt_lost_block import run
from tests.simt.test_simt_persistent import CASES, H200, ONE, RESIDENT, check
from tests.simt.test_simt_recurrence import OPTIONS, lstm, mogrifier

pytestmark = [
    pytest.mark.sampled_files("simulated GPU", 5),
    pytest.mark.skipif(
        platform.machine() != "x86_64" or not shutil.which(build.CXX),
        reason="tests/simt needs g++ on x86-64",
    ),
]
BF16 = torch.bfloat16
# {name: (rounds, (T, B, X, H), the GPU)}
LAYOUTS = {
    "no rounds": (0, (6, 5, 9, 18), {"sms": 4}),
    "odd H, odd X": (5, (4, 5, 9, 17), {"sms": 4}),
    "one block of a cluster owns no inputs": (3, (4, 3, 1, 3), {"sms": 4}),
    "several k-steps": (5, (2, 20, 70, 64), {"sms": 16}),
    "more blocks than inputs": (3, (4, 3, 3, 40), {"sms": 14}),
    "even rounds": (2, (5, 5, 10, 18), {"sms": 4}),
    "31 rows": (1, (3, 31, 10, 18), {"sms": 4}),
    "wide": (5, (3, 5, 50, 64), {"sms": 8}),
    "wide, no rounds": (0, (4, 20, 9, 40), {"sms": 4}),
    "wide, both halves": (1, (3, 20, 20, 180), {"sms": 18}),
    "two replicas": (3, (2, 40, 20, 34), {"sms": 12}),
    "the last row in a replica": (0, (3, 33, 9, 18), {"sms": 8}),
    "rings of two stages": (2, (3, 17, 130, 260), {"sms": 44, "shared": 88000}),
}

# For builds that have the narrow variant alone.
NARROW = {"halves": (1, (2, 17, 4, 156), {"sms": 26})}


@pytest.fixture(scope="module")
def libraries():
    return {mode: build.library(mode, ONE) for mode in ("plain", "checked")}


def plan(steps, B, X, H, rounds, protocol="clusters", element=2, has_clusters=True, **gpu):
    gpu = H200 | gpu
    size = steps, B, X, H, rounds, (rounds + 1) // 2, rounds // 2, element
    limits = gpu["sms"], gpu["shared"], gpu["cooperative"]
    return _C.recurrence_plan(*size, *limits, min(steps, 4), protocol, has_clusters)


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
    assert all(found[direction]["stages"] for direction in RESIDENT)
    assert found["forward"]["wide"] == ("wide" in layout)
    assert found["forward"]["replicas"] == 1 + ("replica" in layout)
    if "rings" in layout:
        assert found["backward"]["stages"] == 2
    call = call_of(rounds, size, **({"state_dropout": 0.3} if rounds else {}))
    check(libraries["plain"], *call, order=order, engine="clusters", **gpu)


@pytest.mark.parametrize("own", [BF16, torch.float16], ids=str)
@pytest.mark.parametrize("options", OPTIONS)
def test_every_option(libraries, options, own):
    call = "mogrifier_lstm", *mogrifier((4, 5, 10, 18), own, **OPTIONS[options])
    check(libraries["plain"], *call, order=4, engine="clusters")


@pytest.mark.parametrize("variational", [False, True])
def test_weight_drop(libraries, variational):
    args, kwargs = lstm((3, 5, 9, 17), BF16, True, True)
    dropped = {"weight_drop": 0.4, "variational": variational, "seed": 5}
    check(libraries["plain"], "lstm", args, kwargs | dropped, order=2, engine="clusters")


@pytest.mark.slow
def test_650_units_in_few_blocks(libraries):
    """82 blocks of 8 units, with 20 rows: two row tiles, rings of three stages forward."""
    size, rounds, gpu = (1, 20, 650, 650), 1, {"sms": 82}
    found = plan(*size, rounds, **gpu)
    assert [found["forward"][name] for name in ("blocks", "columns_h", "stages")] == [82, 8, 3]
    call = "mogrifier_lstm", *mogrifier(size, BF16, rounds)
    check(libraries["plain"], *call, order=1, engine="clusters", **gpu)


CHECKED = ["no rounds", "odd H, odd X", "wide", "rings of two stages"]


@pytest.mark.parametrize("layout", CHECKED)
@pytest.mark.parametrize("order", [1, 2])
def test_no_races_and_no_uninitialised_reads(libraries, layout, order):
    rounds, size, gpu = LAYOUTS[layout]
    if "rings" in layout and order > 1:
        return  # takes long
    check(libraries["checked"], *call_of(rounds, size), order=order, engine="clusters", **gpu)


@pytest.mark.parametrize("engine", ["persistent, clusters", "clusters, loop"])
def test_the_other_direction_may_have_other_kernels(libraries, engine):
    call = mogrifier((4, 5, 10, 18), BF16, **OPTIONS["dropped"])
    check(libraries["plain"], "mogrifier_lstm", *call, order=2, engine=engine)


# ---- launches that do not fit


@pytest.mark.parametrize("limit", [{"resident": 3}, {"clusters": 1}])
def test_a_launch_that_does_not_fit_is_refused(libraries, limit):
    """The driver refuses it, or says that fewer clusters are resident at a time."""
    with pytest.raises(RuntimeError, match="the driver refused the cooperative launch"):
        check(libraries["plain"], "lstm", *lstm((4, 5, 9, 17), BF16), engine="clusters", **limit)


def test_a_gpu_without_clusters_has_none(libraries):
    call = lstm((4, 5, 9, 17), BF16)
    with pytest.raises(RuntimeError, match="the plan has no clusters in forward"):
        check(libraries["plain"], "lstm", *call, engine="clusters", capability=89)


# ---- defects

# The narrow variant in bf16 alone, which compiles fast.
FEW = ONE | {
    "persistent_clusters.cu": {
        "return launch<__half>(p, stream);": "return nullptr;",
        **{
            f"launch(clusters_{direction}_kernel<S, ClusterVariant<true>>, p, stream)": "nullptr"
            for direction in RESIDENT
        },
    }
}
PLAIN = "lstm", *lstm((6, 5, 8, 18), BF16, True, True)
# With slices of several k-steps in both directions, so that both blocks of a cluster copy.
MOGRIFIER = "mogrifier_lstm", *mogrifier(NARROW["halves"][1], BF16, rounds=1)
CLUSTER, PRODUCTS = "persistent_cluster.cuh", "persistent_products.cuh"
DEFECTS = {  # file, old, new
    "no wait for the flags": (PRODUCTS, "    wait(v, own, epoch);\n\n", "    __syncwarp();\n\n"),
    "a wait for the other half's flags": (
        PRODUCTS,
        "    wait(v, own, epoch);\n\n",
        "    wait(v, ring.rank ? KSlice{s.begin, second} : KSlice{second, s.end}, epoch);\n\n",
    ),
    "the other half": (
        PRODUCTS,
        "own = ring.rank ? KSlice{second, s.end} : KSlice{s.begin, second};",
        "own = !ring.rank ? KSlice{second, s.end} : KSlice{s.begin, second};",
    ),
    "no wait for the copies": (PRODUCTS, "      wait_for(ring.arrived(at), at.turn & 1);\n", ""),
    "the other parity": (
        PRODUCTS,
        "wait_for(ring.arrived(at), at.turn & 1);",
        "wait_for(ring.arrived(at), ~at.turn & 1);",
    ),
    "no proxy fence": (CLUSTER, "    ptx::fence_proxy_async();\n", ""),
    "no wait for the release": (
        CLUSTER,
        "    if (at.turn) wait(released(at), (at.turn - 1) & 1);\n",
        "",
    ),
    "a release before the reads": (
        PRODUCTS,
        "      wait_for(ring.arrived(at), at.turn & 1);\n      RowFragments<V> a[2];\n",
        "      wait_for(ring.arrived(at), at.turn & 1);\n"
        "      if (lane == 0) ring.release(at);\n"
        "      for (int i = 0; i < 40; ++i) ptx::pause();\n"
        "      RowFragments<V> a[2];\n",
    ),
    "a release of the own block only": (
        CLUSTER,
        "    for (uint32_t to = 0; to < 2; ++to)\n      ptx::barrier_arrive(released(at), to);",
        "    for (uint32_t to = 0; to < 2; ++to)\n      ptx::barrier_arrive(released(at), rank);",
    ),
    "too few bytes": (CLUSTER, "from ? tiles * FRAGMENT : 0;", "from ? FRAGMENT : 0;"),
    "no barrier at the end": (
        "persistent_forward.cuh",
        "  if constexpr (V::CLUSTERS) ptx::cluster_sync();\n",
        "",
    ),
    "no fence of the barriers": (CLUSTER, "      ptx::fence_barrier_init();\n", ""),
    "no cluster barrier at the start": (
        "persistent_forward.cuh",
        "    ptx::cluster_sync();  // also",
        "    __syncthreads();  // also",
    ),
}
# What a defect changes besides: the release is moved and not doubled.
BESIDES = {
    "a release before the reads": {
        "      __syncwarp();\n      if (lane == 0) ring.release(at);\n": "      __syncwarp();\n"
    }
}


def test_the_kernels_without_a_defect_pass(libraries):
    for path in libraries.values():
        check(path, *PLAIN, order=1, engine="clusters")
    check(libraries["plain"], *MOGRIFIER, order=1, engine="clusters", sms=26)


# What the checked build reports of a defect.
RACES = {
    "no proxy fence": "race on global memory: .*, then a bulk copy",
    "no wait for the copies": "(race on|uninitialised) shared memory",
    "a wait for the other half's flags": "race on global memory: .*, then a bulk copy",
    "no wait for the release": "race on shared memory: .*, then a bulk copy",
    "a release of the own block only": "race on shared memory: .*, then a bulk copy",
    "no cluster barrier at the start": "race on shared memory|a barrier that is not initialised",
}
# These show in the numbers only if a block falls behind the other one of its cluster by a whole
# exchange, which the simulation seldom lets it do.
ONLY_CHECKED = (
    "no wait for the release",
    "a release of the own block only",
    "no cluster barrier at the start",
)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("defect", [name for name in DEFECTS if name not in ONLY_CHECKED])
def test_a_defect_fails(defect):
    file, old, new = DEFECTS[defect]
    changes = {**FEW, file: {old: new, **BESIDES.get(defect, {})}}
    path = build.library("plain", changes)
    for order in range(1, 6):
        for call, sms in ((PLAIN, 4), (MOGRIFIER, 26)):
            try:
                check(path, *call, order=order, engine="clusters", sms=sms)
            except (AssertionError, RuntimeError):
                return
    pytest.fail("no call has shown the defect")


@pytest.mark.sampled(4)
@pytest.mark.parametrize("defect", RACES)
def test_the_checked_build_reports_a_race(defect):
    file, old, new = DEFECTS[defect]
    path = build.library("checked", {**FEW, file: {old: new}})
    with pytest.raises(RuntimeError, match=RACES[defect]):
        check(path, "lstm", *lstm((6, 5, 8, 18), BF16), order=1, engine="clusters")


# ---- lost blocks

LOST = {  # changes of the bounds, file, old, new, message
    "an epoch": (
        {"MAX_POLLS = 1u << 26": "MAX_POLLS = 1500"},
        "persistent_forward.cuh",
        "    } else {\n      g.publish(epoch);",
        "    } else if (epoch != 3 || g.block != 1) {\n      g.publish(epoch);",
        r"read the flag of block 1 1500 times for epoch 3, and it shows epoch 2\.",
    ),
    "copies": (
        # All lanes of a warp poll a barrier, few poll flags: these polls are faster here.
        {"MAX_POLLS = 1u << 26": "MAX_POLLS = 20000", "16 * MAX_POLLS": "MAX_POLLS / 64"},
        CLUSTER,
        "ptx::copy_to_both(",
        "if (at.turn < 2 || blockIdx.x != 0) ptx::copy_to_both(",
        r"read the barrier for copies of block [01] 312 times for epoch \d, and they are not "
        r"complete\.",
    ),
}


@pytest.mark.parametrize("what", LOST)
def test_what_is_lost_is_an_error_that_names_its_block(what):
    """There is one row, so that few threads do anything but poll."""
    bounds, file, old, new, message = LOST[what]
    changes = {**FEW, "lost_wait.h": bounds, file: {old: new}}
    with Simulated(build.library("plain", changes)) as kernels:
        kernels.device(sms=4)
        call = mogrifier((4, 1, 10, 18), BF16, rounds=5)
        with pytest.raises(RuntimeError, match=rf"block \d+ \(warp group 0\) {message}"):
            run(kernels, "mogrifier_lstm", 1, *call, engine="clusters")
        kernels.forget_lost_wait()


# ---- the plan


def test_clusters_are_used_where_they_are_asked_for_and_fit():
    size = 70, 20, 650, 650, 5
    for direction in RESIDENT:
        found, flags = plan(*size)[direction], plan(*size, protocol="flags")[direction]
        assert found["blocks"] == flags["blocks"] == 130
        assert found["stages"] == {"forward": 3, "backward": 7}[direction]
        stage = 8 * (2 * 2 * 512 + 16)  # of 8 warps: 2 k-steps of 2 row tiles, and 2 barriers
        assert found["shared"] == flags["shared"] + found["stages"] * stage
        assert flags["stages"] == 0
    for other in (
        (70, 80, 650, 650, 5),  # more rows than one group has,
        (70, 20, 1150, 1150, 5),  # weights in registers,
        (70, 20, 912, 912, 0),  # 131 blocks
    ):
        assert plan(*other)["persistent"]
        assert plan(*other) == plan(*other, protocol="flags")
    assert not plan(*size, has_clusters=False)["forward"]["stages"]
    assert not plan(*size, element=4)["forward"]["stages"]


def test_rings_have_at_least_two_stages_if_they_need_more():
    size = 70, 20, 650, 650, 5
    flags = plan(*size, protocol="flags")["forward"]
    two = flags["shared"] + 2 * 8 * (2 * 2 * 512 + 16)
    assert plan(*size, shared=two)["forward"]["stages"] == 2
    assert plan(*size, shared=two)["forward"]["shared"] == two
    assert plan(*size, shared=two - 1)["forward"] == flags
    # With 16 rows or fewer a stage has one row tile.
    one_tile = flags["shared"] + 2 * 8 * (2 * 512 + 16)
    assert plan(70, 16, 650, 650, 5, shared=one_tile)["forward"]["stages"] == 2
    # A vector with one k-step for each warp needs one stage.
    assert plan(70, 20, 128, 128, 5)["forward"]["stages"] == 1


@pytest.mark.parametrize("sms", [1, 3, 66, 108, 132, 148])
@pytest.mark.parametrize("size", [c[0] for c in CASES.values()], ids=list(CASES))
def test_clusters_have_two_blocks_of_one_replica(size, sms):
    _, _, X, H, rounds = size
    found = plan(*size, sms=sms)
    for direction in RESIDENT:
        layout = found[direction]
        if not layout["stages"]:
            continue
        assert layout["blocks"] % 2 == 0
        assert layout["replicas"] * layout["blocks"] <= sms
        assert (layout["blocks"] - 1) * layout["columns_h"] < H
        assert layout["blocks"] * layout["columns_h"] >= H
        assert not rounds or layout["blocks"] * layout["columns_x"] >= X
        assert layout["shared"] <= H200["shared"]
        widest = 4 * H if direction == "backward" else max(H, X if rounds else 0)
        assert layout["stages"] == 1 or 2 <= layout["stages"] <= -(-widest // 256) + 1


def test_the_protocol_takes_nothing_from_what_fits():
    """Where clusters do not fit, the plan is that of flags."""
    for size, _ in CASES.values():
        clusters, flags = plan(*size), plan(*size, protocol="flags")
        assert clusters["persistent"] == flags["persistent"]
        for direction in RESIDENT:
            assert clusters[direction]["slices"] == flags[direction]["slices"]
            assert clusters[direction]["stages"] or clusters[direction] == flags[direction]


def test_the_estimate_keeps_flags():
    """By the estimate clusters save nothing."""
    assert _C.exchange_cycles("clusters") > 0.75 * _C.exchange_cycles("flags")
    for size, _ in CASES.values():
        assert plan(*size, protocol="estimate") == plan(*size, protocol="flags")
