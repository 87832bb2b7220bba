"""What nvcc made of csrc/*.cu in this build: nothing spilled, and no more registers than the table knows."""

import ptxas_table
import pytest
from fusedseq import _load

pytestmark = pytest.mark.skipif(not _load.build_info()["nvcc"], reason="this build has no CUDA in it")


def test_nothing_is_spilled_or_on_the_stack():
    kernels = ptxas_table.found()
    assert {kernel.split()[0] for kernel in kernels} == {*_load.build_info()["ptxas"]}
    for kernel, gpus in kernels.items():
        for gpu, facts in gpus.items():
            assert facts["spills"] == facts["stack"] == 0, f"{kernel} on {gpu}"


def test_as_in_the_table():
    """`python tests/ptxas_table.py` shows what differs, with --write it becomes the table."""
    if ptxas_table.table() is None:
        pytest.skip(f"the table does not know {_load.build_info()['nvcc']}")
    now, table = ptxas_table.found(), ptxas_table.table()
    assert {*now} == {*table}
    for kernel, gpus in now.items():
        for gpu in gpus.keys() & table[kernel].keys():  # another TORCH_CUDA_ARCH_LIST builds for others
            assert gpus[gpu] == table[kernel][gpu], f"{kernel} on {gpu}"
