"""DDP and FSDP2's fully_shard on two processes compute what one process computes."""

import pytest
import torch

from tests.support import parallel_steps

pytestmark = pytest.mark.cpu


@pytest.fixture(scope="module")
def of_two():
    return parallel_steps.results()


@pytest.mark.parametrize("way", ["DDP", "FSDP"])
@pytest.mark.parametrize("name", parallel_steps.OBJECTIVES)
def test_two_processes_take_the_steps_of_one(name, way, of_two):
    """In fp64, where sums in another order differ by some roundings."""
    losses, parameters = of_two[name, way]
    wanted_losses, wanted = parallel_steps.in_one_process(name)
    initial, _, _ = parallel_steps.objective(name)
    torch.testing.assert_close(losses, wanted_losses, rtol=1e-12, atol=0)
    assert [*parameters] == [*wanted]
    for key, p in wanted.items():
        torch.testing.assert_close(parameters[key], p, rtol=1e-12, atol=1e-14)
    assert any(
        not torch.equal(wanted[key.replace("module.", "")], p)
        for key, p in initial.named_parameters()
    )
