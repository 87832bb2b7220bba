"""A small Transformer in training mode: the operators and their oracles give the same model."""

import pytest
import torch
from fusedseq import fused, nn, reference
from torch import nn as torch_nn

from tests.support.placement import exact

pytestmark = pytest.mark.usefixtures("on_device")
V, E, N, T, B = 23, 12, 3, 9, 4
POSITIONS = {
    "added": lambda: None,
    "alibi": lambda: nn.ALiBi(N),
    "bias": lambda: nn.RelativeBias(N, 8, 16),
    "keys": lambda: nn.RelativeKeys(2, E // N),
    "rotary": lambda: nn.Rotary(E // N, max_positions=4),
}


class Layer(torch_nn.Module):
    """A decoder layer: self-attention, attention to a source and a feed-forward."""

    def __init__(self, positions, prenorm, ops):
        super().__init__()
        self.attend = nn.MultiheadAttention(E, N, 0.2, positions=positions, ops=ops)
        self.attend_source = nn.MultiheadAttention(E, N, 0.2, ops=ops)
        self.feed_forward = nn.FeedForward(E, 2 * E, 0.2, ops=ops)
        self.norms = torch_nn.ModuleList(
            [nn.ResidualLayerNorm(E, 0.3, prenorm=prenorm, ops=ops) for _ in range(3)]
        )
        self.prenorm = prenorm

    def forward(self, x, source, source_lengths):
        sublayers = (
            lambda x: self.attend(x, x, x, is_causal=True)[0],
            lambda x: self.attend_source(x, source, source, key_lengths=source_lengths)[0],
            self.feed_forward,
        )
        if not self.prenorm:
            for norm, sublayer in zip(self.norms, sublayers, strict=True):
                x = norm(sublayer(x), x)
            return x
        added, s = x, None
        for norm, sublayer in zip(self.norms, sublayers, strict=True):
            y, s = norm(added, s)
            added = sublayer(y)
        return s + added


class Decoder(torch_nn.Module):
    def __init__(self, positions, prenorm, ops):
        super().__init__()
        shared = POSITIONS[positions]()  # by both layers, as in T5
        self.embedding = nn.Embedding(V, E, dropout=0.1, ops=ops)
        self.positions = (
            nn.SinusoidalPositions(E, 0.1, ops=ops) if shared is None else torch_nn.Identity()
        )
        self.layers = torch_nn.ModuleList([Layer(shared, prenorm, ops) for _ in range(2)])
        self.linear_cross_entropy = ops.linear_cross_entropy

    def forward(self, ids, source, source_lengths, targets):
        x = self.positions(self.embedding(ids))
        for layer in self.layers:
            x = layer(x, source, source_lengths)
        return x, self.linear_cross_entropy(x, self.embedding.weight, targets)


def pair(positions, prenorm):
    ours, oracle = (Decoder(positions, prenorm, ops).to(exact()) for ops in (fused, reference))
    oracle.load_state_dict(ours.state_dict())
    return ours, oracle


def batch():
    ids = torch.randint(V, (T + 1, B))
    return ids[:-1], torch.randn(7, B, E, dtype=exact()), torch.tensor([7, 3, 0, 5]), ids[1:]


@pytest.mark.parametrize("prenorm", [False, True], ids=["post", "pre"])
@pytest.mark.parametrize("positions", POSITIONS)
def test_both_operator_sets_give_the_same_model(positions, prenorm):
    inputs, results = batch(), []
    for model in pair(positions, prenorm):
        torch.manual_seed(5)
        y, loss = model(*inputs)
        results.append((y, loss, *torch.autograd.grad(loss, list(model.parameters()))))
        torch.manual_seed(6)
        assert not torch.equal(model(*inputs)[0], y)
    torch.testing.assert_close(*results)


@pytest.mark.parametrize("positions", POSITIONS)
def test_both_operator_sets_train_to_the_same_loss(positions):
    """Some steps of Adam, each with new random masks."""
    inputs, losses = batch(), []
    for model in pair(positions, True):
        torch.manual_seed(5)
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
        for _ in range(5):
            loss = model(*inputs)[1]
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.detach())
    torch.testing.assert_close(losses[:5], losses[5:])
    assert len({*map(float, losses)}) > 4


@torch.no_grad()
@pytest.mark.parametrize("positions", POSITIONS)
def test_cached_decoding_equals_decoding_the_whole_sequence(positions):
    """With caches of self-attention and of attention to the source."""
    model = Decoder(positions, True, fused).to(exact()).eval()
    ids, source, lengths, targets = batch()
    expected, _ = model(ids, source, lengths, targets)
    caches = [(layer.attend.cache(B, T), layer.attend_source.cache(B, 7)) for layer in model.layers]
    for t in range(T):
        x = model.embedding(ids[t : t + 1])
        x = model.positions(x, offset=t) if positions == "added" else x
        for layer, (target_cache, source_cache) in zip(model.layers, caches, strict=True):
            given = (source, source) if t == 0 else ()
            y, s = layer.norms[0](x, None)
            y, s = layer.norms[1](layer.attend(y, y, y, is_causal=True, cache=target_cache)[0], s)
            y, s = layer.norms[2](
                layer.attend_source(y, *given, key_lengths=lengths, cache=source_cache)[0], s
            )
            x = s + layer.feed_forward(y)
        torch.testing.assert_close(x[0], expected[t])
