"""The dropout masks of the Triton kernels consist of the documented words, whatever the shape of a
tile."""

import pytest
import torch
from fusedseq import fused, reference
from fusedseq.reference.dropout_mask import philox as oracle_philox

pytestmark = pytest.mark.triton
SEEDS = [0, -1, 2**40 + 17, -(2**63)]


@pytest.fixture(scope="module")
def keep_mask():
    """keep_mask(seed, counter, p): the mask of kernels/philox.py for counters of one to three
    dimensions."""
    from tests.support.philox_tile_mask import keep_mask

    return keep_mask


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("first", [0, 2**32 - 5, 2**33 + 5, 2**62])
@pytest.mark.parametrize("shape", [(16,), (4, 8), (2, 4, 4)], ids=str)
def test_tile_has_the_words_of_its_counters(keep_mask, device, seed, first, shape):
    """Counters beyond 2**32 belong to masks larger than a test can allocate, hence the kernel for
    one tile."""
    counter = first + torch.arange(torch.Size(shape).numel(), device=device).reshape(shape)
    words = torch.stack(oracle_philox(seed, counter), dim=-1).flatten(-2)
    for p in (2**-32, 0.1, 0.5, 0.9, 1 - 2**-32):
        assert torch.equal(keep_mask(seed, counter, p), words >= round(p * 2**32)), p


@pytest.mark.parametrize(
    "shape", [(), (1,), (7,), (3, 1), (2, 3, 5), (33, 130), (0, 3), (3, 0)], ids=str
)
@pytest.mark.parametrize("p", [0.0, 0.3, 1 - 2**-32, 1.0])
def test_mask_equals_the_oracles(device, shape, p):
    for seed in SEEDS:
        assert torch.equal(
            fused.dropout_mask(seed, p, shape, device),
            reference.dropout_mask(seed, p, shape, device),
        )
