"""Dropout, embedding, regularization and NT-ASGD as nvcc compiled them: their PTX, with the
properties that tests/simt tests of the same kernels as C++.
"""

import platform
import shutil

import pytest
import torch

from tests.ptx import build
from tests.simt import build as simt
from tests.simt import test_simt as pointwise
from tests.simt import test_simt_embedding as words
from tests.simt.memory import Simulated

pytestmark = [
    pytest.mark.sampled_files("PTX", 5),
    pytest.mark.skipif(
        platform.machine() != "x86_64" or not shutil.which(simt.CXX),
        reason="tests/simt needs g++ on x86-64",
    ),
    pytest.mark.skipif(not build.nvcc(), reason="nvcc is not found"),
]
TYPES = pytest.mark.parametrize("own", pointwise.TYPES, ids=str)
BUILDS = {"sm_90a": ("plain", "sm_90a"), "sm_80": ("plain", "sm_80")}
BUILDS["sm_90a checked"] = "checked", "sm_90a"
NAMES = "dropout", "embedding", "regularization", "nt_asgd"
SOURCES = [source for source in build.SOURCES if source.stem in NAMES]


@pytest.fixture(params=BUILDS)
def kernels(request):
    with Simulated(build.library(*BUILDS[request.param], sources=SOURCES)) as simulated:
        yield simulated


@TYPES
def test_dropout(kernels, own):
    for shape in ((1, 3, 2), (4, 2, 17), (2, 3, 1200)):
        pointwise.test_dropouts_equal_their_oracles(kernels, shape, own, 1)


@TYPES
def test_embedding(kernels, own):
    """37 tokens are three of the tiles of tokens whose gradients a block adds."""
    for size in ((1, 1, 1), (37, 7, 10), (40, 90, 33)):
        words.test_gather_equals_its_oracle(kernels, size, own, 1)
        words.test_scatter_computes_the_gradient(kernels, size, own, 2)
    words.test_compact_gradient(kernels, own, 1)


def test_an_id_outside_of_the_table_stops_the_kernel(kernels):
    words.test_an_id_outside_of_the_table_stops_the_kernel(kernels, 7, 1)


@TYPES
def test_activation_regularization(kernels, own):
    for shape in ((1, 1, 1), (5, 3, 17), (7, 4, 300)):
        words.test_activation_regularization_equals_its_oracle(kernels, shape, own, 1)


@pytest.mark.parametrize("own", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("misaligned", [0, 1])
def test_nt_asgd(kernels, own, misaligned):
    pointwise.test_nt_asgd_equals_a_step_in_fp64(kernels, own, misaligned, 1)
