"""torch.func's per-sample gradients equal those of a loop over the samples, which runs kernels."""

import fusedseq
import pytest
import torch
from fusedseq import nn
from fusedseq.models.language_model import LanguageModel, LanguageModelSettings
from torch.func import functional_call, grad, vmap

pytestmark = pytest.mark.cpu

E, T, B, V = 8, 5, 3, 11
RECURRENT = {"dropout": 0.3, "weight_drop": 0.4}


class OutputLayer(torch.nn.Module):
    """The loss of an output layer with splits, and the weight that the loss takes."""

    def __init__(self):
        super().__init__()
        self.loss, self.output = nn.SplitCrossEntropy(E, (4, 8)), torch.nn.Linear(E, V)
        torch.nn.init.normal_(self.loss.tombstones)

    def forward(self, x, target):
        return self.loss(x, target, self.output.weight, self.output.bias)


def accelerated(model):
    assert fusedseq.accelerate(model).replaced
    return model


def vectors():
    return torch.randn(B, T, E, dtype=torch.float64)


def ids():
    """Words of V in B samples; the first has the padding, 0, and a word of each split."""
    return torch.tensor([[1, 0, 4, 1, 10], [2, 2, 2, 2, 2], [5, 9, 0, 3, 8]])


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
    "TransformerDecoderLayer": lambda: nn.TransformerDecoderLayer(E, 2, 16, 0.3),
    "Embedding": lambda: nn.Embedding(V, E, 0, dropout=0.4),
    "SplitCrossEntropy": OutputLayer,
    "accelerated LSTM": lambda: accelerated(torch.nn.LSTM(E, 6, 2, dropout=0.4)),
    "accelerated TransformerDecoderLayer": lambda: accelerated(
        torch.nn.TransformerDecoderLayer(E, 2, 16, 0.3)
    ),
}
RANDOM = [name for name in MODULES if name != "SplitCrossEntropy"]  # in training
# {the end of a module's name: batches of its inputs}, else one batch of vectors
INPUTS = {
    "DecoderLayer": lambda: (vectors(), vectors()),
    "Embedding": lambda: (ids(),),
    "SplitCrossEntropy": lambda: (vectors(), ids()),
}


def batches_of(name):
    """Returns the batches of the inputs of a module, each (B, T) or (B, T, E)."""
    make = (create for end, create in INPUTS.items() if name.endswith(end))
    return next(make, lambda: (vectors(),))()


def loss_of(module):
    """(parameters, one sample of each input) -> a scalar; a sample is a batch of 1."""

    def loss(parameters, *sample):
        inputs = tuple(t[:, None] for t in sample)
        inputs *= 3 if isinstance(module, nn.MultiheadAttention) else 1
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
    module, batches = MODULES[name]().double().eval(), batches_of(name)
    loss = loss_of(module)
    found = vmap(grad(loss), (None, *(0 for _ in batches)))(detached(module), *batches)
    wanted = by_loop(module, loss, *batches)
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


@pytest.mark.parametrize("name", RANDOM)
def test_masks_of_samples_are_as_vmap_is_asked(name):
    """randomness="same" gives every sample the masks of a call, "different" others to each."""
    module = MODULES[name]().double()
    sample, parameters = [batch[0] for batch in batches_of(name)], detached(module)
    batches = [t.expand(B, *t.shape) for t in sample]
    loss = loss_of(module)

    def gradients(randomness):
        torch.manual_seed(5)
        places = (None, *(0 for _ in batches))
        return vmap(grad(loss), places, randomness=randomness)(parameters, *batches)

    key = next(iter(parameters))
    same, different = gradients("same")[key], gradients("different")[key]
    torch.manual_seed(5)
    torch.testing.assert_close(same, grad(loss)(parameters, *sample)[key].expand_as(same))
    assert not torch.allclose(different[0], different[1])
    with pytest.raises(RuntimeError, match="randomness"):
        gradients("error")
