"""torch.utils.checkpoint gives the gradients of a run without it, with every dropout on.

The forward pass is computed twice. Random masks are functions of a seed that a module draws from
torch's generator, whose state checkpointing restores, so both passes have the same masks.
"""

import pytest
import torch
from fusedseq import fused, nn
from torch.utils.checkpoint import checkpoint

E, T, B, V = 8, 5, 3, 11
RECURRENT = {"dropout": 0.3, "weight_drop": 0.4}


def words(x):
    """T * B words on the device of x: autograd's thread, which computes a checkpointed module
    again, has no default device."""
    return torch.arange(T * B, device=x.device).view(T, B) % V


class Words(torch.nn.Module):
    """x (T, B, E) plus the vectors of T * B words."""

    def __init__(self, ops):
        super().__init__()
        self.embedding = nn.Embedding(V, E, padding_idx=0, dropout=0.4, ops=ops)

    def forward(self, x):
        return x + self.embedding(words(x))


class DroppedWeight(torch.nn.Module):
    """A product with a weight of which elements, or rows, are dropped."""

    def __init__(self, variational, ops):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.randn(E, E) / 3)
        self.drop = nn.WeightDrop(0.4, variational, ops=ops)

    def forward(self, x):
        return x @ self.drop(self.weight).T


class OutputLayer(torch.nn.Module):
    """x (T, B, E) plus the loss of an output layer after dropout of x."""

    def __init__(self, splits, reduction, ops):
        super().__init__()
        self.dropout, self.reduction = nn.Dropout(0.3, ops=ops), reduction
        self.loss, self.output = nn.SplitCrossEntropy(E, splits, ops=ops), torch.nn.Linear(E, V)

    def forward(self, x):
        target = words(x)
        of_rows = (self.dropout(x), target, self.output.weight, self.output.bias, self.reduction)
        loss = self.loss(*of_rows)
        return x + (loss[..., None] if self.reduction == "none" else loss)


MODULES = {
    "LSTM": lambda ops: nn.LSTM(E, E, 2, **RECURRENT, ops=ops),
    "MogrifierLSTM": lambda ops: nn.MogrifierLSTM(
        E, E, 2, **RECURRENT, input_dropout=0.2, state_dropout=0.2, zoneout_h=0.1, ops=ops
    ),
    "GRU": lambda ops: nn.GRU(E, E, 2, **RECURRENT, ops=ops),
    "RNN": lambda ops: nn.RNN(E, E, 2, **RECURRENT, ops=ops),
    "PeepholeLSTM": lambda ops: nn.PeepholeLSTM(E, E, 2, **RECURRENT, ops=ops),
    "LayerNormLSTM": lambda ops: nn.LayerNormLSTM(E, E, 2, **RECURRENT, ops=ops),
    "LayerNormGRU": lambda ops: nn.LayerNormGRU(E, E, **RECURRENT, zoneout_h=0.2, ops=ops),
    "MultiheadAttention": lambda ops: nn.MultiheadAttention(
        E, 2, 0.3, positions=nn.RelativeBias(2), ops=ops
    ),
    "FeedForward": lambda ops: nn.FeedForward(E, 16, 0.3, ops=ops),
    "TransformerEncoderLayer": lambda ops: nn.TransformerEncoderLayer(E, 2, 16, 0.3, ops=ops),
    "pre-norm TransformerEncoderLayer": lambda ops: nn.TransformerEncoderLayer(
        E, 2, 16, 0.3, norm_first=True, ops=ops
    ),
    "TransformerDecoderLayer": lambda ops: nn.TransformerDecoderLayer(E, 2, 16, 0.3, ops=ops),
    "Dropout": lambda ops: nn.Dropout(0.3, ops=ops),
    "LockedDropout": lambda ops: nn.LockedDropout(0.3, ops=ops),
    "ResidualLayerNorm": lambda ops: nn.ResidualLayerNorm(E, 0.3, ops=ops),
    "Embedding": Words,
    "WeightDrop": lambda ops: DroppedWeight(False, ops),
    "variational WeightDrop": lambda ops: DroppedWeight(True, ops),
    "SplitCrossEntropy": lambda ops: OutputLayer((4, 8), "mean", ops),
    "SplitCrossEntropy of each row": lambda ops: OutputLayer((4, 8), "none", ops),
    "SplitCrossEntropy without splits": lambda ops: OutputLayer((), "mean", ops),
}


def run(module, x, **options):
    """Two calls after the same seed; returns the loss and the gradients of x and the parameters."""

    def call(y):
        if isinstance(module, nn.MultiheadAttention):
            return module(y, y, y)[0]
        if isinstance(module, nn.TransformerDecoderLayer):
            return module(y, y.flip(0))
        result = module(y)
        return result[0] if isinstance(result, tuple) else result

    torch.manual_seed(11)
    x = x.clone().requires_grad_()
    y = x
    for _ in range(2):
        y = checkpoint(call, y, **options) if options else call(y)
    loss = y.sin().sum()
    loss.backward()
    grads = {name: p.grad for name, p in module.named_parameters()}
    module.zero_grad()
    return loss.detach(), {"x": x.grad, **grads}


@pytest.mark.parametrize("use_reentrant", [True, False])
@pytest.mark.parametrize("name", MODULES)
def test_checkpointing_changes_no_gradient(name, use_reentrant, ops, on_device):
    module, x = MODULES[name](ops), torch.randn(T, B, E)
    loss, grads = run(module, x)
    again, found = run(module, x, use_reentrant=use_reentrant)
    assert torch.equal(again, loss)
    for key, g in grads.items():
        torch.testing.assert_close(found[key], g, msg=lambda text, key=key: f"{key}: {text}")
    other = run(module.eval(), x)[0]
    assert not torch.equal(other, loss), "dropout was on"


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_a_seed_that_is_not_restored_changes_the_gradients(use_reentrant, on_device):
    """What the test above would find: the second forward pass draws other masks."""
    module, x = MODULES["LSTM"](fused), torch.randn(T, B, E)
    options = {"use_reentrant": use_reentrant, "preserve_rng_state": False}
    _, grads = run(module, x)
    _, found = run(module, x, **options)
    assert not torch.allclose(found["x"], grads["x"])
