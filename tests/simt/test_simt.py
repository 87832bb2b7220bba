"""CUDA kernels of dropout and NTASGD on the simulated GPU, and the simulation itself.

The kernels are compared with their oracles in both builds and in several orders of threads. Kernels
with a defect (probes.cu, cooperative_probes.cu, and kernels with one changed line) must be
reported. README.md explains the simulation.
"""

import platform
import re
import shutil

import pytest
import torch
from fusedseq import reference

from tests.simt import build
from tests.simt.memory import NtAsgdTensor, Simulated

pytestmark = [
    pytest.mark.sampled_files("simulated GPU", 5),
    pytest.mark.skipif(
        platform.machine() != "x86_64" or not shutil.which(build.CXX),
        reason="tests/simt needs g++ on x86-64",
    ),
]
SEEDS = pytest.mark.parametrize("seed", [0, 1, 2])
# In the order of the enum in csrc/cuda/type.h.
TYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16]
# Constants made smaller, so that small tensors need several blocks and several steps of a thread.
SMALL = {
    "dropout.cu": {"TARGET_THREADS = 1 << 18": "TARGET_THREADS = 600"},
    "nt_asgd.cu": {"CHUNK = 32768": "CHUNK = 2048", "CAPACITY = 64": "CAPACITY = 4"},
}


@pytest.fixture(params=["plain", "checked"])
def mode(request):
    return request.param


@pytest.fixture
def kernels(mode):
    with Simulated(build.library(mode, SMALL)) as simulated:
        yield simulated


@pytest.fixture
def changed(mode):
    """A function that compiles the kernels with one text in one source replaced."""
    used = []

    def change(source, old, new):
        changes = {**SMALL, source: {**SMALL[source], old: new}}
        used.append(Simulated(build.library(mode, changes)))
        return used[-1]

    yield change
    for simulated in used:
        simulated.__exit__()


def drop(kernels, x, p, mask_seed, seed, by_row=False, misaligned=0):
    """x: (T, B, D)"""
    x, y = kernels.copy(x, misaligned), kernels.empty(x.shape, x.dtype, misaligned)
    key = kernels.copy(torch.tensor([mask_seed]))
    threshold, scale = round(p * 2**32), 1 / (1 - p) if p < 1 else 0.0
    pointers = x.data_ptr(), y.data_ptr(), key.data_ptr()
    kernels.run(
        "dropout", TYPES.index(x.dtype), *x.shape, *pointers, threshold, scale, by_row, seed=seed
    )
    return y.clone()


@SEEDS
@pytest.mark.parametrize("own", TYPES, ids=str)
@pytest.mark.parametrize(
    "shape", [(1, 1, 1), (1, 3, 2), (4, 2, 17), (3, 130, 20), (7, 11, 650), (2, 3, 1200)], ids=str
)
def test_dropouts_equal_their_oracles(kernels, shape, own, seed):
    x = torch.randn(shape).to(own)
    for misaligned in (0, 1):
        found = drop(kernels, x, 0.4, 2**63 - 5, seed, misaligned=misaligned)
        assert torch.equal(found, reference.locked_dropout(x, 0.4, 2**63 - 5))
    for p in (0.5, 1.0):
        found = drop(kernels, x[:1], p, -7, seed)[0]
        assert torch.equal(found, reference.dropout(x[0], p, -7))
        assert torch.equal(
            drop(kernels, x[:1], p, -7, seed, by_row=True)[0],
            reference.weight_drop(x[0], p, -7, True),
        )


def test_dropped_elements_may_be_nan(kernels):
    x = torch.full((2, 3, 50), torch.nan)
    assert torch.equal(
        drop(kernels, x, 0.5, 9, 1).isnan(), reference.locked_dropout(x, 0.5, 9).isnan()
    )


def test_a_tensor_too_large_for_the_grid_is_an_error(kernels):
    with pytest.raises(RuntimeError, match="more elements in a step"):
        kernels.run("dropout", 0, 1, 2**45, 4, None, None, None, 0, 1.0, False, seed=0)


SIZES = [1, 5, 2048, 2049, 5000, 3, 64, 7, 1, 2, 130]  # more tensors than one launch takes


def nt_asgd(kernels, own, seed, misaligned=0, max_norm=0.25, mu=0.25, sizes=SIZES):
    """One step by the kernels and in fp64: [(got, expected)] of norm, parameters and averages."""
    computing = torch.float32 if own == torch.bfloat16 else own
    lr, weight_decay = 0.3, 0.1
    g, p, average = ([torch.randn(n).to(t) for n in sizes] for t in (own, own, computing))
    norm = torch.cat([t.double() for t in g]).norm()
    clip = (max_norm / (norm + 1e-6)).clamp(max=1)
    wanted_p = [
        b.double() - lr * (clip * a.double() + weight_decay * b.double())
        for a, b in zip(g, p, strict=True)
    ]
    wanted_average = [
        a.double() + mu * (b.to(own).double() - a.double())
        for a, b in zip(average, wanted_p, strict=True)
    ]
    here = [[kernels.copy(t, misaligned) for t in ts] for ts in (g, p, average)]
    kind = TYPES.index(own)
    table = (NtAsgdTensor * len(sizes))(
        *((kind, n, *(t.data_ptr() for t in ts)) for n, *ts in zip(sizes, *here, strict=True))
    )
    wide = own == torch.float64
    partial = kernels.empty((kernels.library.nt_asgd_partials(table, len(sizes)),), torch.float64)
    found = kernels.empty((1,), torch.float64 if wide else torch.float32)
    kernels.run(
        "nt_asgd_norm", table, len(sizes), partial.data_ptr(), found.data_ptr(), wide, seed=seed
    )
    kernels.run(
        "nt_asgd_step",
        table,
        len(sizes),
        found.data_ptr(),
        wide,
        max_norm,
        lr,
        weight_decay,
        mu,
        seed=seed,
    )
    return [
        (found[0], norm),
        *zip(here[1], wanted_p, strict=True),
        *zip(here[2], wanted_average, strict=True),
    ]


@SEEDS
@pytest.mark.parametrize("own", TYPES[:3], ids=str)
@pytest.mark.parametrize("misaligned", [0, 1])
def test_nt_asgd_equals_a_step_in_fp64(kernels, own, misaligned, seed):
    tolerance = 8 * torch.finfo(own).eps  # a step has about five roundings
    for found, wanted in nt_asgd(kernels, own, seed, misaligned):
        torch.testing.assert_close(found.double(), wanted, rtol=tolerance, atol=tolerance)


# (source, old text, new text): the changed kernel fails or gives wrong numbers
HEADER = '#include "cuda/block_sum.cuh"\n'
REMOVED_BARRIER = (
    "nt_asgd.cu",
    HEADER,
    f"#include <cuda_runtime.h>\n#define __syncthreads(...)\n{HEADER}",
)
REMOVED_BOUNDS_CHECK = "dropout.cu", "plane - first < N ? int(plane - first) : N", "N"
WRONG_MASK_INDEX = "dropout.cu", "blocks = (d.D + 3) / 4", "blocks = d.D / 4"
WRONG_ALIGNMENT = "dropout.cu", "load(x, n, aligned<N>(x), v)", "load(x, n, true, v)"


@SEEDS
def test_a_removed_barrier_is_reported(changed, mode, seed):
    kernels = changed(*REMOVED_BARRIER)
    if mode == "checked":
        with pytest.raises(RuntimeError, match=r"shared memory.*block_sum\.cuh:\d+"):
            nt_asgd(kernels, torch.float32, seed)
    elif seed:
        found, wanted = nt_asgd(kernels, torch.float32, seed)[0]
        assert not torch.isclose(found.double(), wanted)


@SEEDS
def test_a_removed_bounds_check_is_reported(changed, mode, seed):
    message = {
        "plain": "guard zone of a buffer of",
        "checked": r"outside of a buffer at (dropout\.cu|vector_access\.cuh):\d+",
    }
    with pytest.raises(RuntimeError, match=message[mode]):
        drop(changed(*REMOVED_BOUNDS_CHECK), torch.ones(1, 3, 17), 0.5, 3, seed)


@SEEDS
def test_a_wrong_mask_index_is_reported(changed, seed):
    x = torch.ones(2, 5, 17)
    assert not torch.equal(
        drop(changed(*WRONG_MASK_INDEX), x, 0.5, 3, seed), reference.locked_dropout(x, 0.5, 3)
    )


@pytest.mark.parametrize("mode", ["checked"])  # x86 allows misaligned accesses
def test_a_misaligned_wide_access_is_reported(changed, mode):
    with pytest.raises(RuntimeError, match=r"needs alignment to 16 bytes, vector_access\.cuh:\d+"):
        drop(changed(*WRONG_ALIGNMENT), torch.ones(2, 5, 17), 0.5, 3, 1, misaligned=1)


@SEEDS
def test_shuffles_votes_barriers_and_atomics(kernels, seed):
    out = kernels.copy(torch.zeros(1, dtype=torch.int32))
    kernels.run("probe", PROBES.index("features"), 3, 64, out.data_ptr(), seed=seed)
    assert out.item() == 3 * 64
    kernels.run("probe", PROBES.index("largest"), 3, 50, out.data_ptr(), seed=seed)
    assert out.item() == 192


PROBES = re.findall(
    r"\w+", re.search(r"KERNELS\[\] = \{(.*?)\}", (build.HERE / "probes.cu").read_text(), re.S)[1]
)
# {defect: the message}, reported by both builds, and by the checked build only
REPORTED = {
    "two_barriers": r"wait at __syncthreads of line \d+ and of line \d+",
    "ended": "__syncthreads reached by 60 threads, the other 4 have ended",
    "deadlock": "deadlock: ",
    "foreign_lane": "not one of the lanes 0000ffff",
    "beyond": "guard zone|outside of a buffer at probes.cu",
}
REPORTED_BY_CHECKED = {
    "lost_update": r"race on global memory: .*probes\.cu:\d+",
    "two_blocks": r"race on global memory: .*probes\.cu:\d+",
    "uninitialized": r"reads uninitialized shared memory at probes\.cu:\d+",
    "beyond_shared": r"index 64 outside of its array, probes\.cu:\d+|uninitialized",
    "write_after_read": r"race on shared memory",
    "no_syncwarp": r"race on shared memory|uninitialized",
    "misaligned": r"needs alignment to 16 bytes, probes\.cu:\d+",
}


DEFECTS = [
    *((mode, name) for mode in ("plain", "checked") for name in REPORTED),
    *(("checked", name) for name in REPORTED_BY_CHECKED),
]


@SEEDS
@pytest.mark.parametrize(("mode", "defect"), DEFECTS)
def test_a_defect_is_reported(kernels, mode, defect, seed):
    out = kernels.copy(torch.zeros(128, dtype=torch.int32))
    with pytest.raises(RuntimeError, match={**REPORTED, **REPORTED_BY_CHECKED}[defect]):
        kernels.run("probe", PROBES.index(defect), 2, 64, out.data_ptr(), seed=seed)


def test_every_probe_is_tested():
    assert {*PROBES} == {"features", "largest", *REPORTED, *REPORTED_BY_CHECKED}


def test_a_launch_beyond_the_limits_is_an_error(kernels):
    with pytest.raises(RuntimeError, match="a block of 1025 threads"):
        kernels.run("probe", 0, 1, 1025, None, seed=0)


MORE_SEEDS = range(8)
THREADS = 64  # of a block in tests/simt/cooperative_probes.cu
COOPERATIVE_PROBES = (build.HERE / "cooperative_probes.cu").read_text()
DEFECT_NAMES = re.findall(r"\w+", re.search(r"Defect \{(.*?)\}", COOPERATIVE_PROBES, re.S)[1])
DEFECT = {name: i for i, name in enumerate(DEFECT_NAMES)}


def exchanged(kernels, defect, seed, blocks=4, steps=5):
    n = blocks * THREADS
    wanted = torch.arange(n) * 7
    x = kernels.copy(torch.stack([wanted, wanted * 0]).to(torch.uint16))
    flags = kernels.copy(torch.zeros(blocks, dtype=torch.int32))
    kernels.run(
        "probe_exchange", DEFECT[defect], blocks, steps, flags.data_ptr(), x.data_ptr(), seed=seed
    )
    for _ in range(steps):
        wanted = (wanted.sum() + torch.arange(n)) % 2**16
    return torch.equal(x[steps % 2].long(), wanted)


def rotated(kernels, defect, seed, blocks=4, steps=5, probe="probe_rotate"):
    start = torch.arange(blocks * THREADS, dtype=torch.int32)
    x = kernels.copy(torch.stack([start, start * 0]))
    arrived = kernels.copy(torch.zeros(1, dtype=torch.int32))
    kernels.run(probe, DEFECT[defect], blocks, steps, arrived.data_ptr(), x.data_ptr(), seed=seed)
    return torch.equal(x[steps % 2], start.roll(steps * THREADS))


def rotated_in_groups(kernels, defect, seed):
    return rotated(kernels, defect, seed, probe="probe_rotate_in_groups")


def turned_around(kernels, defect, seed, blocks=3, threads=128):
    start = torch.arange(blocks * threads, dtype=torch.int32).view(-1, 64)
    x = kernels.copy(start)
    kernels.run("probe_turn_around", DEFECT[defect], blocks, threads, x.data_ptr(), seed=seed)
    return torch.equal(x, start.flip(1))


@pytest.mark.parametrize("probe", [exchanged, rotated, rotated_in_groups, turned_around])
def test_threads_wait_for_each_other(kernels, probe):
    assert all(probe(kernels, "NONE", seed) for seed in MORE_SEEDS)


def test_one_block_waits_for_its_own_flag(kernels):
    assert all(exchanged(kernels, "NONE", seed, blocks=1) for seed in range(32))


# Defects that give wrong numbers in the plain build under most seeds. The checked build reports
# all.
WRONG_NUMBERS = [
    *(
        (exchanged, name)
        for name in ("NO_BARRIER", "NO_RELEASE", "NO_WAIT", "NO_ACQUIRE", "NO_SYNCWARP")
    ),
    *((rotated, name) for name in ("NO_BARRIER", "NO_WAIT", "NO_SECOND_BARRIER")),
    *((probe, "NO_BARRIER") for probe in (rotated_in_groups, turned_around)),
]
DEFECTS_BETWEEN_THREADS = [
    *((mode, *defect) for mode in ("plain", "checked") for defect in WRONG_NUMBERS),
    *(("checked", rotated, name) for name in ("NO_FENCE", "NO_SECOND_FENCE")),
]


@pytest.mark.parametrize(("mode", "probe", "defect"), DEFECTS_BETWEEN_THREADS)
def test_a_defect_between_threads_is_reported(kernels, mode, probe, defect):
    if mode == "plain":
        assert sum(not probe(kernels, defect, seed) for seed in MORE_SEEDS) >= len(MORE_SEEDS) / 2
        return
    for seed in MORE_SEEDS:
        with pytest.raises(
            RuntimeError, match=r"(race on|reads uninitialized shared) .*cooperative_probes\.cu:\d+"
        ):
            probe(kernels, defect, seed)


@SEEDS
def test_an_endless_wait_is_reported(kernels, seed):
    """With the line of the loop: that of load_acquire, or of ptx::pause, which follows."""
    loop = COOPERATIVE_PROBES[: COOPERATIVE_PROBES.index("ptx::load_acquire(flags")].count("\n") + 1
    message = rf"thread \d+ of block \d waits in a loop at line ({loop}|{loop + 1})\b"
    with pytest.raises(RuntimeError, match=f"exchange: deadlock: {message}"):
        exchanged(kernels, "NO_STORE", seed)


@SEEDS
def test_a_write_beyond_dynamic_shared_memory_is_reported(kernels, mode, seed):
    message = {
        "plain": "guard zone of a buffer of 512",
        "checked": r"outside of a buffer at cooperative_probes.cu:\d+",
    }
    with pytest.raises(RuntimeError, match=f"turn_around: .*{message[mode]}"):
        turned_around(kernels, "TOO_FAR", seed)


def test_the_device_has_the_required_limits(kernels):
    facts, y, x = (kernels.copy(torch.zeros(n, dtype=torch.int32)) for n in (6, 1280, 1280))
    y.copy_(torch.arange(1280))

    def launch(blocks, shared, allow):
        pointers = (t.data_ptr() for t in (facts, y, x))
        kernels.run("probe_device", blocks, 128, shared, allow, *pointers, seed=1)
        return facts.tolist()

    assert launch(4, 1024, False) == [4, 232448, 1, 90, 16, 0]
    assert torch.equal(x[:512].view(-1, 64), y[:512].view(-1, 64).flip(1))
    with pytest.raises(
        RuntimeError, match="turn_around: 50000 bytes of dynamic shared memory, 49152 are allowed"
    ):
        launch(4, 50000, False)
    assert facts.tolist()[4:] == [0, 1]  # cudaErrorInvalidValue
    assert launch(4, 150000, True)[4:] == [1, 0]
    with pytest.raises(RuntimeError, match="turn_around: a cooperative grid of 5 blocks, 4 fit"):
        launch(5, 150000, True)
    assert facts[5] == 720  # cudaErrorCooperativeLaunchTooLarge
    kernels.device(sms=5, shared=101376, capability=86)
    assert launch(10, 50000, True) == [5, 101376, 1, 86, 2, 0]
    with pytest.raises(
        RuntimeError, match="turn_around: 101377 bytes of dynamic shared memory, 50000 are allowed"
    ):
        launch(1, 101377, True)
    kernels.device(cooperative=False)
    with pytest.raises(RuntimeError, match="no cooperative launch"):
        launch(1, 1024, False)


@SEEDS
@pytest.mark.parametrize("own", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_mma_computes_a_product(kernels, own, seed):
    K = 48
    a, b = torch.randn(16, K).to(own), torch.randn(K, 8).to(own)
    a[3, 40], b[7, 5] = torch.nan, torch.inf
    here, d = [kernels.copy(t) for t in (a, b)], kernels.empty((16, 8), torch.float32)
    kernels.run(
        "probe_product", TYPES.index(own), K, *(t.data_ptr() for t in (*here, d)), seed=seed
    )
    wanted, scale = a.double() @ b.double(), a.double().abs() @ b.double().abs()
    finite = wanted.isfinite()
    assert finite.sum() == 15 * 7
    assert ((d.double() - wanted).abs() <= K * 2**-24 * scale)[finite].all()
    if own == torch.float32:  # fp32 is split into bf16 parts, and an infinite part gives NaN
        assert not d[~finite].isfinite().any()
    else:
        assert torch.equal(d[~finite].nan_to_num(nan=7), wanted[~finite].float().nan_to_num(nan=7))


def test_a_product_of_fp32_is_exact_for_extreme_values(kernels):
    K, a = 8, torch.randn(16, 8)
    a[0] = torch.finfo(torch.bfloat16).max * torch.tensor([1, -1, 1 - 2**-12, 1, -1, 1, 1, 0.5])
    a[1] = 2.0 ** torch.tensor([-100, -108, 60, 80, -80, 0, 120, -60]) * (1 + 2**-13 + 2**-23)
    cuda_nan = torch.tensor(0x7FFFFFFF, dtype=torch.int32).view(torch.float32)
    a[2, 3], a[3, 5] = torch.nan, cuda_nan
    here, d = [kernels.copy(t) for t in (a, torch.eye(K))], kernels.empty((16, 8), torch.float32)
    pointers = (t.data_ptr() for t in (*here, d))
    kernels.run("probe_product", TYPES.index(torch.float32), K, *pointers, seed=0)
    assert d[2:4].isnan().all()
    exact = [row for row in range(16) if row not in (2, 3)]
    assert torch.equal(d[exact], a[exact])


def test_both_ptx_headers_declare_the_same_functions():
    declared = [
        {
            *re.findall(
                r"^(?:__device__|inline|SIMT_CALL|template <class T> SIMT_CALL) .*?(\w+)\(",
                path.read_text(),
                re.M,
            )
        }
        for path in (build.ROOT / "csrc/cuda/ptx.cuh", build.HERE / "include/cuda/ptx.cuh")
    ]
    assert declared[0] == declared[1] >= {"mma", "barrier", "load_acquire", "dynamic_shared"}
