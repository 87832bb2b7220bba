"""The machine code of this build's CUDA kernels: little spills, and registers are as recorded in
ptxas_table.json.
"""

import re
import subprocess
from pathlib import Path

import pytest
from fusedseq import _load

from tests.ptx import ptxas_table

pytestmark = pytest.mark.skipif(
    not _load.build_info()["nvcc"], reason="this build has no CUDA in it"
)


# Most persistent kernels use nearly all of the 255 registers that a thread can have. The variants
# with weights in registers (RESIDENT), and those with three row tiles and in fp32 the wide ones and
# those with two groups of rows (FULL), spill the most. The limits are the largest values of the
# recorded table, in bytes stored and loaded.
RESIDENT = re.compile(r"persistent_\w+_kernel<.*, Variant<1, 2, true, [1-9]")
FULL = re.compile(
    r"persistent_\w+_kernel<.*, Variant<2, 3"
    r"|persistent_\w+_kernel<float, Variant<(2|1, 2, true)"
)
OTHERS = {"sm_80": 24, "sm_120": 44}


def limit(kernel, gpu):
    """The most bytes of spills and of the stack of a kernel."""
    if gpu == "sm_90a":
        return 32 if re.search(r"persistent_\w+_kernel<float, Variant<2, [23]", kernel) else 0
    if RESIDENT.search(kernel):
        return 340
    if FULL.search(kernel):
        return 176
    return OTHERS.get(gpu, 0) if "persistent_forward_kernel" in kernel else 0


def test_little_is_spilled():
    """No spill at all on sm_90a, but for two variants in fp32; on the other GPUs of few kernels."""
    kernels = ptxas_table.found()
    reports = _load.build_info()["ptxas"].items()
    with_kernels = {source for source, lines in reports if "entry function" in "\n".join(lines)}
    assert {kernel.split()[0] for kernel in kernels} == with_kernels
    for kernel, gpus in kernels.items():
        for gpu, facts in gpus.items():
            assert max(facts["spills"], facts["stack"]) <= limit(kernel, gpu), f"{kernel} on {gpu}"


def test_registers_and_spills_are_as_recorded():
    """`python tests/ptx/ptxas_table.py` shows the differences; with --write it records this build's
    values.
    """
    if ptxas_table.table() is None:
        pytest.skip(f"no values are recorded for {_load.build_info()['nvcc']}")
    now, table = ptxas_table.found(), ptxas_table.table()
    assert {*now} == {*table}
    for kernel, gpus in now.items():
        # With another TORCH_CUDA_ARCH_LIST the build has other GPUs than the table.
        for gpu in gpus.keys() & table[kernel].keys():
            assert gpus[gpu] == table[kernel][gpu], f"{kernel} on {gpu}"


def test_dropout_moves_16_bytes_at_once():
    """nvcc has split such a store into one for each element before, which ptxas's report does not
    show.
    """
    triton = pytest.importorskip("triton", reason="its cuobjdump is needed")
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    listing = subprocess.run(
        [tool, "-sass", _load.PACKAGE / "_ops.so"], capture_output=True, text=True, check=True
    ).stdout
    kernels = [
        part
        for part in listing.split("Function : ")[1:]
        if "dropout_kernel" in part.partition("\n")[0]
    ]
    assert kernels
    for kernel in kernels:
        for access in ("LDG", "STG"):
            assert re.search(rf"\b{access}\.\S*128", kernel), (
                f"{kernel.partition(chr(10))[0]} has no {access} of 16 bytes"
            )
