"""Every Triton kernel is compiled for each GPU on a machine without one: see triton_table.py."""

import itertools
from pathlib import Path

import pytest

from tests.triton import triton_calls, triton_table

pytest.importorskip("triton")
CALLS = [(call, gpu) for call in triton_table.CALLS for gpu in triton_table.CAPABILITIES]
# What is compiled although the table is up to date: a call of each kind of kernel, each for one
# GPU, in turn.
SAMPLE = [
    "attention-L6-S6-D32-lengths-dropout0.1",
    "attention-L6-S6-D10-mask-dropout0.1",
    "attention-L90-S90-D20-mask-dropout0.1",
    "attention-L90-S90-D20-projected-lengths-dropout0.3",
    "attention-L1024-S1024-D64-causal",
    "attention-L1024-S1024-D64-causal-specialized",
    "attention-L1-S1024-D64-causal-rows",
    "bias_activation_dropout-5760x2048-gelu-bfloat16",
    "dropout_mask",
    "linear_cross_entropy-bfloat16",
    "residual_layer_norm_backward-5760x512-bfloat16",
]


def test_the_table_is_up_to_date():
    """If this fails: python -m tests.triton.triton_table --write. Until then the tests here compile
    what is not, of all calls in half an hour on two cores.
    """
    if triton_table.table() is None:
        pytest.skip(f"triton_table.json has no Triton {triton_table.version()}")
    assert triton_table.outdated_jobs() == []


@pytest.fixture(scope="module")
def compiled():
    sample = zip(SAMPLE, itertools.cycle(triton_table.CAPABILITIES), strict=False)
    jobs = {*triton_table.outdated_jobs(), *sample}
    return triton_table.updated(triton_table.table(), jobs, triton_table.compile_all([*jobs]))


# Bytes spilled by a thread. In the heads wider than 64, which are processed in chunks of D, every
# smaller tile that was tried spills too, on one GPU or another. For heads of 64 none was tried.
SPILLS = {
    "attention-L1024-S1024-D64-lengths-dropout0.1-N_kv2": 24,
    "attention-L1024-S1024-D128-causal-lengths-alibi-N_kv2": 32,
    "attention-L1024-S1024-D64-rope-causal-dropout0.1-lengths-alibi-bias-mask": 8,
    "attention-L1024-S1024-D128-fp32-rope-causal-dropout0.1-lengths-alibi-bias-mask": 48,
    "attention-L1024-S1024-D256-rope-causal-dropout0.1-lengths-alibi-bias-mask": 64,
    "attention-L1024-S1024-D512-lengths-dropout0.1-N_kv2": 40,
    "attention-L1024-S1024-D256-mask-dropout0.1": 72,
    "attention-L6-S6-D10-mask-dropout0.1": 8,
    **{call: 16 for call in triton_calls.DESCRIBED if call.endswith("specialized")},
}
# The tiles were chosen for the other three GPUs.
SPILLS_ON_SM_120 = {
    "attention-L1024-S1024-D64-window-softcap30-sinks-causal-dropout0.1-lengths-alibi-bias-mask": 8,
    "attention-L90-S90-D60-projected-lengths-dropout0.3": 48,
    "attention-L90-S90-D64-causal-lengths-dropout0.1": 24,
    "attention-L512-S512-D64-bias": 8,
    "attention-L1024-S1024-D64-causal": 16,
    "attention-L1024-S1024-D64-lengths-dropout0.1-N_kv2": 16,
    "attention-L1024-S1024-D64-relative64-causal-dropout0.1-lengths-alibi-bias-mask": 16,
    "attention-L1024-S1024-D128-lengths-dropout0.1-N_kv2": 40,
    "attention-L1024-S1024-D128-causal-dropout0.1-window": 32,
    "attention-L1024-S1024-D128-causal-dropout0.1-sinks": 48,
    "attention-L1024-S1024-D128-causal-dropout0.1-varlen": 24,
    "attention-L1024-S1024-D256-causal": 48,
    "attention-L1024-S1024-D256-mask-dropout0.1": 80,
    "attention-L1024-S1024-D256-rope-causal-dropout0.1-lengths-alibi-bias-mask": 48,
    "attention-L1024-S1024-D512-lengths-dropout0.1-N_kv2": 64,
}
# These tiles were the fastest on an H100 in calls without lengths and without ALiBi.
SPILLS_ON_SM_90 = {
    "attention-L1024-S1024-D128-lengths-dropout0.1-N_kv2": 176,
    "attention-L1024-S1024-D128-causal-dropout0-lengths-alibi-bias-mask": 128,
}
# No other tile was tried for this call on sm_100.
SPILLS_ON_SM_100 = {"attention-L1024-S1024-D128-causal-lengths-alibi-N_kv2": 280}
# Bytes of shared memory that a block can have. Code for sm_80 also runs on GPUs of 8.6 and 8.9,
# which have the least.
SHARED_MEMORY = {"sm_80": 101376, "sm_90": 232448, "sm_100": 232448, "sm_120": 101376}


@pytest.mark.parametrize(("call", "gpu"), CALLS)
def test_nothing_is_spilled(compiled, call, gpu):
    # The tiles are chosen for Triton 3.7.1.
    spills = SPILLS_ON_SM_120 if gpu == "sm_120" else SPILLS
    spills = spills | {"sm_90": SPILLS_ON_SM_90, "sm_100": SPILLS_ON_SM_100}.get(gpu, {})
    allowed = spills.get(call, 0) if triton_table.version() == "3.7.1" else 64
    stacks = {name: facts["stack"] for name, facts in compiled[call][gpu].items()}
    assert {name: stack for name, stack in stacks.items() if stack > allowed} == {}


@pytest.mark.parametrize(("call", "gpu"), CALLS)
def test_products_take_each_element_once(compiled, call, gpu):
    wide = {name: facts["wide operands"] for name, facts in compiled[call][gpu].items()}
    assert {name: count for name, count in wide.items() if count} == {}


@pytest.mark.parametrize(("call", "gpu"), CALLS)
def test_shared_memory_suffices(compiled, call, gpu):
    shared = {name: facts["shared"] for name, facts in compiled[call][gpu].items()}
    assert {name: n for name, n in shared.items() if n > SHARED_MEMORY[gpu]} == {}


@pytest.mark.parametrize(
    ("call", "gpu"), [row for row in CALLS if "mask" not in row[0] and "relative" not in row[0]]
)
def test_loads_are_wide(compiled, call, gpu):
    """Excludes masks, of which two bytes are two elements, and relative keys, whose products are
    not read in address order."""
    loads = {name: facts["narrow loads"] for name, facts in compiled[call][gpu].items()}
    # cross_entropy_rows loads two single numbers: the logit of the target, and its bias.
    single = {"cross_entropy_rows": 2}
    assert {name: n for name, n in loads.items() if n > single.get(name, 0)} == {}


def test_registers_and_shared_memory_equal_the_table(compiled):
    """An intended change is recorded with: python -m tests.triton.triton_table --write"""
    table = triton_table.table()
    if table is None:
        pytest.skip(f"triton_table.json has no Triton {triton_table.version()}")
    assert compiled == table


def launches_a_kernel(module):
    """Returns whether the sources of a module or package of fusedseq.kernels launch a Triton
    kernel."""
    path = Path(triton_table.kernels.__path__[0], module)
    files = path.rglob("*.py") if path.is_dir() else [path.with_suffix(".py")]
    return any("launch.run(" in file.read_text() for file in files)


def test_every_launcher_is_compiled():
    """Except for `linear`, which has no Triton kernel."""
    modules = triton_table.kernels.MODULES
    launchers = {module for module in modules.values() if launches_a_kernel(module)}
    assert {modules[call.partition("-")[0]] for call in triton_table.CALLS} == launchers
