"""torch.compile of accelerated models in training: the bits of eager mode with the same seed."""

import fusedseq
import pytest
import torch
from torch import nn

from tests.modules.test_accelerate import MODELS, first, sequence
from tests.modules.test_accelerate_awd_lstm import B, LockedDropout, Model, T, X

pytestmark = pytest.mark.usefixtures("in_exact_dtype")


@pytest.fixture(autouse=True)
def _without_earlier_graphs():
    yield
    torch._dynamo.reset()  # which would skip more functions of torch from here on


def step(function, parameters, x, seed):
    """Returns the output and all gradients of a training step with the masks of the seed."""
    torch.manual_seed(seed)
    x = x.clone().requires_grad_()
    y = first(function(x))
    weight = torch.linspace(-1, 1, y.numel()).view_as(y)
    return [y.detach(), *torch.autograd.grad((y * weight).sum(), [x, *parameters])]


def assert_compiled_is_eager(model, x, fullgraph=False):
    """Torch's own dropout would draw other masks after the same seed."""
    compiled = torch.compile(model, backend="aot_eager", fullgraph=fullgraph)
    parameters = [*model.parameters()]
    for seed in (1, 2):
        expected = step(model, parameters, x, seed)
        torch.testing.assert_close(step(compiled, parameters, x, seed), expected)
    assert not torch.equal(first(compiled(x)), first(compiled(x)))


@pytest.mark.parametrize("name", ["lstm", "gru", "rnn"])
def test_a_recurrence_with_dropout(name):
    """Dynamo refuses subclasses of torch's recurrent modules, and compiles what they call."""
    model = MODELS[name][0]().train()
    assert fusedseq.accelerate(model).replaced
    assert_compiled_is_eager(model, sequence())


def test_the_classes_of_awd_lstm():
    model = Model().train()
    assert len(fusedseq.accelerate(model).replaced) == 3
    assert_compiled_is_eager(model, torch.randn(T, B, X))


def test_locked_dropout_has_one_mask_for_all_steps():
    model = nn.Sequential(LockedDropout()).train()
    assert fusedseq.accelerate(model).replaced
    assert_compiled_is_eager(model, torch.randn(T, B, X), fullgraph=True)
    y = torch.compile(model, backend="aot_eager")(torch.ones(T, 20, 50))
    assert (y == y[:1]).all()
    # 1,000 masks: the standard deviation of the fraction is 0.016.
    assert (y == 0).double().mean().item() == pytest.approx(0.5, abs=0.08)
