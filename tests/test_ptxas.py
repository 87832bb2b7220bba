"""What nvcc made of csrc/*.cu in this build: nothing spilled, and no more registers than the table knows."""

import re
import subprocess
from pathlib import Path

import ptxas_table
import pytest
from fusedseq import _load

pytestmark = pytest.mark.skipif(not _load.build_info()["nvcc"], reason="this build has no CUDA in it")


# With weights in registers, 250 and more of them are in use: a few addresses are spilled before the loop over time, and read
# again once a phase. So it is in fp32 with two groups of rows.
FULL = re.compile(r"persistent_\w+_kernel<.*, Variant<1, 2, true, [1-9]|persistent_\w+_kernel<float, Variant<2")


def test_nothing_is_spilled_or_on_the_stack():
    kernels = ptxas_table.found()
    assert {kernel.split()[0] for kernel in kernels} == {*_load.build_info()["ptxas"]}
    for kernel, gpus in kernels.items():
        most = 64 if FULL.search(kernel) else 0
        for gpu, facts in gpus.items():
            assert max(facts["spills"], facts["stack"]) <= most, f"{kernel} on {gpu}"


def test_as_in_the_table():
    """`python tests/ptxas_table.py` shows what differs, with --write it becomes the table."""
    if ptxas_table.table() is None:
        pytest.skip(f"the table does not know {_load.build_info()['nvcc']}")
    now, table = ptxas_table.found(), ptxas_table.table()
    assert {*now} == {*table}
    for kernel, gpus in now.items():
        for gpu in gpus.keys() & table[kernel].keys():  # another TORCH_CUDA_ARCH_LIST builds for others
            assert gpus[gpu] == table[kernel][gpu], f"{kernel} on {gpu}"


def test_dropout_moves_16_bytes_at_once():
    """nvcc has taken such a store apart before, without a word in ptxas's report."""
    triton = pytest.importorskip("triton", reason="its cuobjdump is needed")
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    listing = subprocess.run(
        [tool, "-sass", _load.PACKAGE / "_ops.so"], capture_output=True, text=True, check=True
    ).stdout
    kernels = [part for part in listing.split("Function : ")[1:] if "dropout_kernel" in part.partition("\n")[0]]
    assert kernels
    for kernel in kernels:
        for access in ("LDG", "STG"):
            assert re.search(rf"\b{access}\.\S*128", kernel), (
                f"{kernel.partition(chr(10))[0]} has no {access} of 16 bytes"
            )
