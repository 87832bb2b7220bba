"""The tests of test_ptx_recurrence.py with the PTX for sm_80, in bf16: the kernels in other dtypes
are those of sm_90a line for line (test_ptx_mutants.py).
"""

import platform
import shutil

import pytest
import torch

from tests.ptx import build
from tests.ptx import test_ptx_recurrence as recurrence
from tests.simt import build as simt
from tests.simt import test_simt_cells as cells
from tests.simt import test_simt_persistent as persistent
from tests.simt import test_simt_words as words
from tests.simt.test_simt_recurrence import OPTIONS

pytestmark = [
    pytest.mark.sampled_files("PTX", 5),
    pytest.mark.skipif(
        platform.machine() != "x86_64" or not shutil.which(simt.CXX),
        reason="tests/simt needs g++ on x86-64",
    ),
    pytest.mark.skipif(not build.nvcc(), reason="nvcc is not found"),
]
CALL = "sm_80", torch.bfloat16


@pytest.fixture(scope="module")
def libraries():
    return {"sm_80": build.library("plain", "sm_80")}


@pytest.mark.parametrize("size", [recurrence.SIZE, (3, 30, 17, 24)], ids=str)
def test_loop(libraries, size):
    recurrence.test_loop(libraries, *CALL, size)


@pytest.mark.parametrize("options", [None, *OPTIONS])
def test_persistent(libraries, options):
    recurrence.test_persistent(libraries, *CALL, options)


@pytest.mark.parametrize("layout", persistent.LAYOUTS)
def test_every_layout(libraries, layout):
    recurrence.test_every_layout(libraries, *CALL, layout)


@pytest.mark.parametrize("layout", cells.LAYOUTS)
@pytest.mark.parametrize("op", cells.CELLS)
def test_persistent_cells(libraries, op, layout):
    recurrence.test_persistent_cells(libraries, *CALL, op, layout)


@pytest.mark.parametrize("layout", words.LAYOUTS)
def test_words_in_place_of_flags(libraries, layout):
    recurrence.test_words_in_place_of_flags(libraries, *CALL, layout)


@pytest.mark.parametrize("options", ["five rounds and one", "locked between", "lengths"])
def test_wavefront(libraries, options):
    recurrence.test_wavefront(libraries, *CALL, options)
