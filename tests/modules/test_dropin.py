"""Modules used in the way torch's modules of the same names are used, compared with these."""

import pytest
import torch
from fusedseq import nn
from fusedseq.models import convert
from torch import nn as torch_nn

from tests.support.same_state import same_state

pytestmark = pytest.mark.usefixtures("in_exact_dtype")
E, N, B, L, S = 12, 3, 4, 5, 7


# Inputs without a batch dimension


@pytest.mark.parametrize("batch_first", [False, True], ids=["TX", "batch-first"])
def test_lstm_without_a_batch_dimension_equals_torch(batch_first, ops):
    ours, theirs = same_state(
        nn.LSTM(6, 5, 2, batch_first=batch_first, ops=ops),
        torch_nn.LSTM(6, 5, 2, batch_first=batch_first),
    )
    x, hx = torch.randn(4, 6), tuple(torch.randn(2, 2, 5))
    torch.testing.assert_close(ours(x), theirs(x))
    torch.testing.assert_close(ours(x, hx), theirs(x, hx))


@pytest.mark.parametrize("sizes", [5, [7, 3]], ids=str)
def test_mogrifier_without_a_batch_dimension_equals_a_batch_of_one(sizes, ops):
    module = nn.MogrifierLSTM(6, sizes, 2, ops=ops)
    x = torch.randn(4, 6)
    y, (h, c) = module(x[:, None])
    first = module(x)
    torch.testing.assert_close(
        first,
        (
            y[:, 0],
            tuple(type(s)(t[0] for t in s) if isinstance(s, list) else s[:, 0] for s in (h, c)),
        ),
    )
    again, _ = module(x, first[1])
    torch.testing.assert_close(again, module(x[:, None], (h, c))[0][:, 0])


@pytest.mark.parametrize("build", [nn.LSTM, nn.MogrifierLSTM])
def test_hx_is_the_state(build, ops):
    module, x, state = build(6, 5, 2, ops=ops), torch.randn(4, B, 6), tuple(torch.randn(2, 2, B, 5))
    torch.testing.assert_close(module(x, hx=state), module(x, state))
    assert not torch.equal(module(x, hx=state)[0], module(x)[0])
    with pytest.raises(ValueError, match="state must be None where hx is given"):
        module(x, state, hx=state)


@pytest.mark.parametrize("shape", [(L,), (B, L)], ids=["unbatched", "batched"])
@pytest.mark.parametrize("integers", [torch.int32, torch.int64], ids=str)
def test_embedding_equals_torch(shape, integers, ops):
    ours, theirs = same_state(nn.Embedding(9, E, ops=ops), torch_nn.Embedding(9, E))
    ids = torch.randint(9, shape, dtype=integers)
    assert torch.equal(ours(ids), theirs(ids))


@pytest.mark.parametrize("batch_first", [False, True], ids=["LBE", "BLE"])
@pytest.mark.parametrize("kind", ["self", "cross"])
def test_attention_without_a_batch_dimension_equals_torch(kind, batch_first, ops):
    ours, theirs = same_state(
        nn.MultiheadAttention(E, N, batch_first=batch_first, need_weights=True, ops=ops),
        torch_nn.MultiheadAttention(E, N, batch_first=batch_first),
    )
    query = torch.randn(L, E)
    key = query if kind == "self" else torch.randn(S, E)
    keys = len(key)
    for options in (
        {},
        {"need_weights": False},
        {"average_attn_weights": False},
        {"key_padding_mask": torch.arange(keys) > 2},
        {"attn_mask": torch.randn(L, keys)},
        {"attn_mask": torch.randn(N, L, keys)},
    ):
        torch.testing.assert_close(
            ours(query, key, key, **options), theirs(query, key, key, **options)
        )
    by_mask = ours(query, key, key, key_padding_mask=torch.arange(keys) >= 3)
    for length in (3, [3], torch.tensor([3]), torch.tensor(3, dtype=torch.int32)):
        torch.testing.assert_close(ours(query, key, key, key_lengths=length), by_mask)


# Integers and lists


def test_int32_targets_of_the_output_layer_equal_int64(ops):
    loss = nn.LinearCrossEntropyLoss(E, 9, ops=ops)
    x, target = torch.randn(L, B, E), torch.randint(9, (L, B))
    assert torch.equal(loss(x, target.int()), loss(x, target))


@pytest.mark.parametrize("splits", [(), (4,)], ids=["plain", "split"])
def test_int32_targets_equal_int64(splits, ops):
    loss = nn.SplitCrossEntropy(E, splits, ops=ops)
    x, W, target = torch.randn(L, B, E), torch.randn(9, E), torch.randint(9, (L, B))
    target[0, 0] = -100
    assert torch.equal(loss(x, target.int(), W), loss(x, target, W))


def test_key_lengths_may_be_a_list_or_int32(ops):
    module, x, lengths = nn.MultiheadAttention(E, N, ops=ops), torch.randn(L, B, E), [5, 0, 2, 1]
    expected = module(x, x, x, key_lengths=torch.tensor(lengths))[0]
    for given in (lengths, tuple(lengths), torch.tensor(lengths, dtype=torch.int32)):
        assert torch.equal(module(x, x, x, key_lengths=given)[0], expected)
    with pytest.raises((TypeError, ValueError), match="key_lengths"):
        nn.MultiheadAttention(E, N)(x, x, x, key_lengths=[1.5, 1, 1, 1])


@pytest.mark.parametrize("build", [nn.LSTM, nn.MogrifierLSTM])
def test_lengths_may_be_a_list_or_int32(build, ops):
    module, x, lengths = build(6, 5, 2, ops=ops), torch.randn(5, B, 6), [5, 0, 2, 1]
    expected = module(x, lengths=torch.tensor(lengths))
    for given in (lengths, torch.tensor(lengths, dtype=torch.int32)):
        torch.testing.assert_close(module(x, lengths=given), expected, rtol=0, atol=0)


# Embedding


@pytest.mark.parametrize("sparse", [False, True], ids=["dense", "sparse"])
@pytest.mark.parametrize("padding_idx", [0, 4, -1])
def test_padding_idx_equals_torch(padding_idx, sparse, ops):
    states = []
    for build in (lambda *a, **k: nn.Embedding(*a, ops=ops, **k), torch_nn.Embedding):
        torch.manual_seed(3)
        states.append(build(9, E, padding_idx, sparse=sparse))
    ours, theirs = states
    assert torch.equal(ours.weight, theirs.weight)
    assert not ours.weight[padding_idx].any()
    assert ours.padding_idx == theirs.padding_idx
    ids = torch.tensor([[8, 4, 0, 1], [0, 4, 2, 8]])
    grads = []
    for module in states:
        with torch.no_grad():
            module.weight[padding_idx] = 2.0  # another vector may be given; it stays as it is
        y = module(ids)
        (y * torch.arange(y.numel()).view_as(y)).sum().backward()
        grads.append(module.weight.grad)
        assert torch.equal(y, module.weight[ids])
    assert ours.weight.grad.is_sparse == sparse
    ours_grad, expected = (g.to_dense() for g in grads)
    torch.testing.assert_close(ours_grad, expected)
    assert not ours_grad[padding_idx].any()
    assert ours_grad.any()


def test_padding_idx_with_a_tied_decoder_dropout_and_second_derivatives(ops):
    """Only the embedding's own gradient leaves the row out; a decoder's is added to it."""
    module, ids = nn.Embedding(9, E, 0, dropout=0.5, ops=ops), torch.tensor([0, 3, 0, 5])
    decoded = module.weight.sum()
    (module(ids).sum() + decoded).backward()
    assert torch.equal(module.weight.grad[0], torch.ones(E))
    plain = nn.Embedding(9, E, 0, ops=ops)
    with torch.no_grad():
        plain.weight[0] = 2.0  # at a vector of zeros the gradient of the squares would be 0
    y = plain(ids)
    (g,) = torch.autograd.grad(y.square().sum(), plain.weight, create_graph=True)
    assert not g[0].any()
    (second,) = torch.autograd.grad(g.sum(), plain.weight)
    expected = torch.zeros(9, E)
    expected[[3, 5]] = 2.0
    torch.testing.assert_close(second, expected)


@pytest.mark.parametrize("freeze", [True, False])
def test_from_pretrained_equals_torch(freeze, ops):
    W, ids = torch.randn(9, E), torch.tensor([1, 8])
    before = torch.get_rng_state()
    ours = nn.Embedding.from_pretrained(W, freeze, 1, ops=ops)
    assert torch.equal(torch.get_rng_state(), before)
    theirs = torch_nn.Embedding.from_pretrained(W, freeze, 1)
    assert torch.equal(ours(ids), theirs(ids))
    assert ours.weight.data_ptr() == W.data_ptr()
    assert ours.weight.requires_grad == theirs.weight.requires_grad
    assert ours.padding_idx == 1
    with pytest.raises(ValueError, match=r"Embedding: embeddings must be \(V, E\), got \(9,\)"):
        nn.Embedding.from_pretrained(W[:, 0])


def test_the_third_argument_of_embedding_is_torchs():
    assert nn.Embedding(50, 8, 1).dropout == 0.0
    assert nn.Embedding(50, 8, 1)(torch.tensor([2])).any()
    with pytest.raises(TypeError, match=r"padding_idx must be an int or None .* got 0.3"):
        nn.Embedding(50, 8, 0.3)
    with pytest.raises(ValueError, match=r"padding_idx must be in \[-V, V\) = \[-50, 50\), got 50"):
        nn.Embedding(50, 8, 50)


# Attention


@pytest.mark.parametrize(("queries", "keys"), [(4, 6), (6, 4), (5, 5)])
@pytest.mark.parametrize("need_weights", [False, True])
def test_is_causal_with_a_mask_is_aligned_as_torchs(queries, keys, need_weights, ops):
    ours, theirs = same_state(
        nn.MultiheadAttention(E, N, ops=ops), torch_nn.MultiheadAttention(E, N)
    )
    query, key = torch.randn(queries, B, E), torch.randn(keys, B, E)
    mask = torch.ones(queries, keys, dtype=torch.bool).triu(1)
    options = {"attn_mask": mask, "is_causal": True, "need_weights": need_weights}
    torch.testing.assert_close(ours(query, key, key, **options), theirs(query, key, key, **options))


@pytest.mark.parametrize(("queries", "keys"), [(4, 6), (6, 4)])
@pytest.mark.parametrize("positions", [None, "keys"])
def test_the_alignment_can_be_chosen(queries, keys, positions, ops):
    positions = nn.RelativeKeys(2, E // N) if positions else None
    module = nn.MultiheadAttention(E, N, positions=positions, ops=ops)
    query, key = torch.randn(queries, B, E), torch.randn(keys, B, E)
    found = {}
    for alignment, first in (("start", 0), ("end", keys - queries)):
        mask = torch.ones(queries, keys, dtype=torch.bool).triu(first + 1)
        found[alignment] = module(query, key, key, is_causal=True, causal_alignment=alignment)[0]
        by_mask = module(query, key, key, attn_mask=mask, causal_alignment=alignment)[0]
        torch.testing.assert_close(found[alignment], by_mask)
    assert not torch.equal(*found.values())
    assert torch.equal(module(query, key, key, is_causal=True)[0], found["end"])
    with pytest.raises(ValueError, match="causal_alignment must be 'start' or 'end', got 'left'"):
        module(query, key, key, causal_alignment="left")
    with pytest.raises(ValueError, match="causal_alignment must be 'end' with a cache"):
        module(key, cache=module.cache(B, 9), causal_alignment="start")


def test_a_converted_attention_returns_weights_as_torchs(ops):
    """In a model that uses the second result, without saying need_weights."""

    class Model(torch_nn.Module):
        def __init__(self):
            super().__init__()
            self.attention = torch_nn.MultiheadAttention(E, N, batch_first=True)

        def forward(self, x):
            y, weights = self.attention(x, x, x)
            return y, weights.argmax(-1)

    model, x = Model(), torch.randn(B, L, E)
    expected = model(x)
    model.attention = convert.attention(model.attention, ops=ops)
    torch.testing.assert_close(model(x), expected)
    assert nn.MultiheadAttention(E, N, ops=ops)(x, x, x)[1] is None
    assert model.attention(x, x, x, need_weights=False)[1] is None
    model.attention.need_weights = False
    assert model.attention(x, x, x)[1] is None


def test_attention_takes_torchs_arguments_in_torchs_order(ops):
    given = (E, N, 0.0, False, False, False, 5, 7, True)
    ours, theirs = same_state(
        nn.MultiheadAttention(*given, ops=ops), torch_nn.MultiheadAttention(*given)
    )
    inputs = torch.randn(B, L, E), torch.randn(B, S, 5), torch.randn(B, S, 7)
    torch.testing.assert_close(ours(*inputs, need_weights=True), theirs(*inputs))


@pytest.mark.parametrize("option", ["add_bias_kv", "add_zero_attn"])
def test_additional_keys_are_refused_by_name(option):
    with pytest.raises(ValueError, match=f"MultiheadAttention: {option} must be False"):
        nn.MultiheadAttention(E, N, **{option: True})
    with pytest.raises(ValueError, match=f"attention must be without {option}"):
        convert.attention(torch_nn.MultiheadAttention(E, N, **{option: True}))


def test_a_query_without_keys_gets_the_bias(ops):
    module, x = nn.MultiheadAttention(E, N, ops=ops), torch.randn(L, B, E, requires_grad=True)
    torch_nn.init.normal_(module.out_proj.bias)
    y, weights = module(x, x, x, attn_mask=torch.ones(L, L) > 0, need_weights=True)
    assert torch.equal(y, module.out_proj.bias.expand_as(y))
    assert not weights.any()
    assert not torch.autograd.grad(y.sum(), x)[0].any()


# Zero sizes


@pytest.mark.parametrize("sizes", [(3, 0, 3), (0, 2, 0), (0, 2, 3), (3, 2, 0), (3, 0, 4)], ids=str)
def test_attention_of_no_elements_equals_torch(sizes, ops):
    queries, rows, keys = sizes
    ours, theirs = same_state(
        nn.MultiheadAttention(E, N, need_weights=True, ops=ops), torch_nn.MultiheadAttention(E, N)
    )
    query = torch.randn(queries, rows, E, requires_grad=True)
    key = query if queries == keys else torch.randn(keys, rows, E)
    results = []
    for module in (ours, theirs):
        y, weights = module(query, key, key)
        grads = torch.autograd.grad(
            y.sum(), [query, *module.parameters()], allow_unused=True, materialize_grads=True
        )
        results.append((y, weights, *grads))
    torch.testing.assert_close(*results)


def test_modules_take_an_empty_batch(ops):
    x = torch.randn(L, 0, E, requires_grad=True)
    modules = [
        nn.LSTM(E, E, 2, dropout=0.5, ops=ops),
        nn.MogrifierLSTM(E, E, 2, ops=ops),
        nn.FeedForward(E, 7, ops=ops),
        nn.ResidualLayerNorm(E, 0.5, ops=ops),
        nn.LockedDropout(ops=ops),
        nn.SinusoidalPositions(E, 0.5, ops=ops),
        nn.LearnedPositions(L, E, 0.5, ops=ops),
        nn.TransformerEncoderLayer(E, N, ops=ops),
        nn.TransformerEncoderLayer(E, N, norm_first=True, ops=ops),
    ]
    modules += [
        nn.MultiheadAttention(E, N, positions=positions, ops=ops)
        for positions in (nn.ALiBi(N), nn.RelativeBias(N), nn.RelativeKeys(2, E // N))
    ]
    for module in modules:
        result = module(x, x, x) if isinstance(module, nn.MultiheadAttention) else module(x)
        y = result[0] if isinstance(result, tuple) else result
        assert y.shape == x.shape, module
        y.sum().backward()
        assert not any(p.grad.any() for p in module.parameters() if p.grad is not None), module


def test_widths_of_zero_equal_torch(ops):
    ours, theirs = same_state(
        nn.TransformerEncoderLayer(E, N, 0, 0.0, ops=ops),
        torch_nn.TransformerEncoderLayer(E, N, 0, 0.0),
    )
    x = torch.randn(L, B, E)
    torch.testing.assert_close(ours(x), theirs(x))
    y = nn.ResidualLayerNorm(0, ops=ops)(torch.randn(3, 0))
    assert y.shape == torch_nn.LayerNorm(0)(torch.randn(3, 0)).shape
