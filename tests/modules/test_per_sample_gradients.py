"""torch.func's per-sample gradients equal those of a loop over the samples, which runs kernels."""

import pytest
import torch
from fusedseq import nn
from fusedseq.models.language_model import LanguageModel, LanguageModelSettings
from torch.func import functional_call, grad, vmap

pytestmark = pytest.mark.cpu

E, T, B, V = 8, 5, 3, 11
RECURRENT = {"dropout": 0.3, "weight_drop": 0.4}
MODULES = {
    "LSTM": lambda: nn.LSTM(E, 6, 2, **RECURRENT),
    "MogrifierLSTM": lambda: nn.MogrifierLSTM(E, 6, 2, **RECURRENT),
    "GRU": lambda: nn.GRU(E, 6, 2, **RECURRENT),
    "RNN": lambda: nn.RNN(E, 6, 2, **RECURRENT),
    "PeepholeLSTM": lambda: nn.PeepholeLSTM(E, 6, 2, **RECURRENT),
    "LayerNormLSTM": lambda: nn.LayerNormLSTM(E, 6, 2, **RECURRENT),
    "LayerNormGRU": lambda: nn.LayerNormGRU(E, 6, 2, **RECURRENT),
    "MultiheadAttention": lambda: nn.MultiheadAttention(E, 2, 0.3, positions=nn.RelativeBias(2)),
    "TransformerEncoderLayer": lambda: nn.TransformerEncoderLayer(E, 2, 16, 0.3),
}


def loss_of(module):
    """(parameters, one sample (T, E)) -> a scalar; a sample is a batch of 1."""

    def loss(parameters, sample):
        x = sample[:, None]
        inputs = (x, x, x) if isinstance(module, nn.MultiheadAttention) else (x,)
        y = functional_call(module, parameters, inputs)
        return (y[0] if isinstance(y, tuple) else y).sin().sum()

    return loss


def detached(module):
    return {name: p.detach() for name, p in module.named_parameters()}


def by_loop(module, loss, *batches):
    """The gradients by ordinary backward passes, one for each sample."""
    parameters = dict(module.named_parameters())
    rows = []
    for sample in zip(*batches, strict=True):
        found = torch.autograd.grad(loss(parameters, *sample), [*parameters.values()])
        rows.append(found)
    columns = zip(*rows, strict=True)
    return {name: torch.stack(rows) for name, rows in zip(parameters, columns, strict=True)}


@pytest.mark.parametrize("name", MODULES)
def test_per_sample_gradients_equal_a_loop(name):
    module = MODULES[name]().double().eval()
    x, loss = torch.randn(B, T, E, dtype=torch.float64), loss_of(module)
    found = vmap(grad(loss), (None, 0))(detached(module), x)
    wanted = by_loop(module, loss, x)
    torch.testing.assert_close(found, wanted)
    for name, p in module.named_parameters():
        assert found[name].shape == (B, *p.shape)
    first = next(iter(wanted.values()))
    assert not torch.allclose(first[0], first[1])


def test_per_sample_gradients_of_a_language_model_equal_a_loop():
    sizes = {"embedding": E, "hidden": E, "layers": 2}
    model = LanguageModel(V, LanguageModelSettings(**sizes, tied=True)).double().eval()

    class Loss(torch.nn.Module):
        """functional_call replaces the parameters of a module within its forward alone."""

        def __init__(self):
            super().__init__()
            self.model = model

        def forward(self, ids):
            y, _, _ = self.model(ids[:-1, None])
            return self.model.cross_entropy(y, ids[1:, None])

    whole, ids = Loss(), torch.randint(V, (B, T))

    def loss(parameters, sample):
        return functional_call(whole, parameters, (sample,))

    found = vmap(grad(loss), (None, 0))(detached(whole), ids)
    torch.testing.assert_close(found, by_loop(whole, loss, ids))


@pytest.mark.parametrize("name", MODULES)
def test_masks_of_samples_are_as_vmap_is_asked(name):
    """randomness="same" gives every sample the masks of a call, "different" others to each."""
    module = MODULES[name]().double()
    sample, parameters = torch.randn(T, E, dtype=torch.float64), detached(module)
    x = sample.expand(B, T, E)
    loss = loss_of(module)

    def gradients(randomness):
        torch.manual_seed(5)
        return vmap(grad(loss), (None, 0), randomness=randomness)(parameters, x)

    key = next(iter(parameters))
    same, different = gradients("same")[key], gradients("different")[key]
    torch.manual_seed(5)
    torch.testing.assert_close(same, grad(loss)(parameters, sample)[key].expand_as(same))
    assert not torch.allclose(different[0], different[1])
    with pytest.raises(RuntimeError, match="randomness"):
        gradients("error")
