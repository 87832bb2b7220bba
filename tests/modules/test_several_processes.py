"""DDP and FSDP2's fully_shard on two processes compute what one process computes."""

import pytest
import torch
import torch.distributed as dist
from fusedseq import nn, optim
from fusedseq.models.translator import Translator
from torch.distributed.fsdp import fully_shard

from tests.modules.test_meta_device import MODELS
from tests.support import parallel_steps

pytestmark = pytest.mark.cpu


@pytest.fixture(scope="module")
def of_two():
    return parallel_steps.results()


@pytest.mark.parametrize("way", parallel_steps.WAYS)
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


def test_every_module_and_model_with_parameters_is_among_them():
    """By itself or within another one."""
    models = [create() for create in MODELS.values()]
    kinds = {type(model) for model in models if [*model.parameters()]}
    trained = set()
    for name in parallel_steps.OBJECTIVES:
        model, _, _ = parallel_steps.objective(name)
        trained |= {type(module) for module in model.modules()}
    assert {nn.RelativeKeys, Translator} <= kinds
    assert {kind.__name__ for kind in kinds - trained} == set()


@pytest.fixture
def process_group():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize("kind", [nn.LSTM, nn.MogrifierLSTM])
def test_a_forget_bias_is_not_lost_in_sharded_parameters(kind, process_group):
    plain, module = fully_shard(kind(3, 4)), fully_shard(kind(3, 4, forget_bias=1.0))
    plain.reset_parameters()
    for sharded, given in ((module, ()), (plain, (1.0,))):
        with pytest.raises(ValueError, match="must come before the parameters are sharded"):
            sharded.reset_parameters(*given)


def test_sharded_parameters_of_ntasgd_are_refused_by_name(process_group):
    module = fully_shard(nn.LSTM(3, 4))
    with pytest.raises(TypeError, match=r"^NTASGD: parameters must be whole in each process, "):
        optim.NTASGD(module.parameters(), 0.1)
