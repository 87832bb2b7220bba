"""Modules used in the way torch's modules of the same names are used, compared with these."""

import copy
import inspect
import pydoc

import pytest
import torch
from fusedseq import fused, nn, reference
from fusedseq.models import convert
from torch import nn as torch_nn

from tests.support.placement import exact

pytestmark = pytest.mark.usefixtures("on_device")
E, N, B, L, S = 12, 3, 4, 5, 7


@pytest.fixture(autouse=True)
def _exact(on_device):
    torch.set_default_dtype(exact())
    yield
    torch.set_default_dtype(torch.float32)


def same_state(ours, theirs):
    for p in theirs.parameters():
        torch_nn.init.normal_(p, std=0.3)
    ours.load_state_dict(theirs.state_dict())
    theirs.load_state_dict(ours.state_dict())
    return ours, theirs


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
    y = plain(ids)
    (g,) = torch.autograd.grad(y.square().sum(), plain.weight, create_graph=True)
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


# Transformer layers

OPTIONS = {
    "post": {},
    "pre": {"norm_first": True},
    "gelu": {"activation": "gelu", "norm_first": True, "layer_norm_eps": 1e-3},
    "batch-first": {"batch_first": True, "activation": torch_nn.GELU(approximate="tanh")},
    "no-bias": {"bias": False, "activation": torch.nn.functional.gelu},
}
options = pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
causal = torch_nn.Transformer.generate_square_subsequent_mask


def layers(name, ops, **options):
    ours = getattr(nn, name)(E, N, 20, 0.0, **options, ops=ops)
    ours, theirs = same_state(ours, getattr(torch_nn, name)(E, N, 20, 0.0, **options))
    assert list(ours.state_dict()) == list(theirs.state_dict())
    return ours, theirs


def sequences(*lengths, batch_first=False):
    made = [torch.randn(n, B, E, requires_grad=True) for n in lengths]
    return [t.transpose(0, 1) for t in made] if batch_first else made


def equal_calls(ours, theirs, *inputs, **options):
    results = []
    for module in (ours, theirs):
        y = module(*inputs, **options)
        wrt = [*inputs, *module.parameters()]
        results.append((y, *torch.autograd.grad(y.square().sum(), wrt)))
    torch.testing.assert_close(*results)


@options
def test_encoder_layer_equals_torch(options, ops):
    ours, theirs = layers("TransformerEncoderLayer", ops, **options)
    (x,) = sequences(L, batch_first=options.get("batch_first", False))
    padding = torch.arange(L) >= torch.tensor([[5], [3], [1], [2]])
    for masks in (
        {},
        {"src_key_padding_mask": padding},
        {"src_mask": causal(L), "is_causal": True},
        {"src_mask": torch.randn(B * N, L, L)},
    ):
        equal_calls(ours, theirs, x, **masks)
        equal_calls(ours.eval(), theirs.eval(), x, **masks)
    equal_calls(ours, theirs, torch.randn(L, E, requires_grad=True))


@options
def test_decoder_layer_equals_torch(options, ops):
    ours, theirs = layers("TransformerDecoderLayer", ops, **options)
    x, memory = sequences(L, S, batch_first=options.get("batch_first", False))
    padding = torch.arange(S) >= torch.tensor([[5], [3], [1], [2]])
    equal_calls(ours, theirs, x, memory)
    equal_calls(
        ours,
        theirs,
        x,
        memory,
        tgt_mask=causal(L),
        tgt_is_causal=True,
        memory_mask=torch.randn(L, S),
        memory_key_padding_mask=torch.where(padding, -torch.inf, 0.0),
    )


@pytest.mark.parametrize("norm_first", [False, True], ids=["post", "pre"])
def test_layers_stack_in_torchs_encoder_and_decoder(norm_first, ops):
    encoders = [
        torch_nn.TransformerEncoder(layer, 2, torch_nn.LayerNorm(E), enable_nested_tensor=False)
        for layer in layers("TransformerEncoderLayer", ops, norm_first=norm_first)
    ]
    decoders = [
        torch_nn.TransformerDecoder(layer, 2)
        for layer in layers("TransformerDecoderLayer", ops, norm_first=norm_first)
    ]
    x, memory = sequences(L, S)
    padding = torch.arange(S) >= torch.tensor([[5], [3], [1], [2]])
    equal_calls(*encoders, memory, src_key_padding_mask=padding)
    equal_calls(*encoders, memory, mask=causal(S), is_causal=True)
    equal_calls(*decoders, x, memory, tgt_mask=causal(L), tgt_is_causal=True)


@pytest.mark.parametrize("norm_first", [False, True], ids=["post", "pre"])
def test_dropout_of_layers_is_where_torchs_is(norm_first, ops):
    """With p = 1 nothing of a sublayer is left; with p in between, eval mode drops nothing."""
    x, memory = sequences(L, S)
    for name, inputs in (
        ("TransformerEncoderLayer", [x]),
        ("TransformerDecoderLayer", [x, memory]),
    ):
        ours, theirs = same_state(
            getattr(nn, name)(E, N, 20, 1.0, norm_first=norm_first, ops=ops),
            getattr(torch_nn, name)(E, N, 20, 1.0, norm_first=norm_first),
        )
        torch.testing.assert_close(ours(*inputs), theirs(*inputs))
        some = getattr(nn, name)(E, N, 20, 0.5, norm_first=norm_first, ops=ops)
        assert not torch.equal(some(*inputs), some(*inputs))
        assert torch.equal(some.eval()(*inputs), some(*inputs))
        probabilities = [m.p for m in some.modules() if isinstance(m, nn.Dropout) and m.p]
        probabilities += [m.dropout for m in some.modules() if hasattr(m, "dropout")]
        assert {p for p in probabilities if p} == {0.5}


@pytest.mark.parametrize("norm_first", [False, True], ids=["post", "pre"])
def test_the_operator_sets_draw_the_same_masks_in_a_layer(norm_first):
    results, memory = [], torch.randn(S, B, E)
    made = nn.TransformerDecoderLayer(E, N, 20, 0.3, norm_first=norm_first)
    x = torch.randn(L, B, E)
    for operators in (fused, reference):
        module = nn.TransformerDecoderLayer(E, N, 20, 0.3, norm_first=norm_first, ops=operators)
        module.load_state_dict(made.state_dict())
        torch.manual_seed(5)
        results.append(module(x, memory))
    torch.testing.assert_close(*results)


# Options that are refused, printed options and signatures

BAD = {
    r"FeedForward: activation must be relu, .* got 'swish'": lambda: nn.FeedForward(
        6, 9, activation="swish"
    ),
    r"FeedForward: d_model must be .* got 0 and 9": lambda: nn.FeedForward(0, 9),
    r"FeedForward: d_model must be .* got 6 and -1": lambda: nn.FeedForward(6, -1),
    r"FeedForward: d_model must be .* got 6.0 and 9": lambda: nn.FeedForward(6.0, 9),
    r"ResidualLayerNorm: eps must be at least 0, got -1": lambda: nn.ResidualLayerNorm(6, eps=-1),
    r"ResidualLayerNorm: eps must be at least 0, got nan": lambda: nn.ResidualLayerNorm(
        6, eps=float("nan")
    ),
    r"ResidualLayerNorm: normalized_shape must be .* got \(3, 6\)": lambda: nn.ResidualLayerNorm(
        (3, 6)
    ),
    r"ResidualLayerNorm: normalized_shape must be .* got -1": lambda: nn.ResidualLayerNorm(-1),
    r"TransformerEncoderLayer: activation must be .* got <function silu": lambda: (
        nn.TransformerEncoderLayer(E, N, activation=torch.nn.functional.silu)
    ),
    r"TransformerDecoderLayer: dropout must be in \[0, 1\], got 2": lambda: (
        nn.TransformerDecoderLayer(E, N, dropout=2)
    ),
}


@pytest.mark.cpu
@pytest.mark.parametrize("sentence", BAD)
def test_bad_options_are_refused_when_the_module_is_made(sentence):
    with pytest.raises(ValueError, match=f"^{sentence}"):
        BAD[sentence]()


@pytest.mark.cpu
def test_residual_layer_norm_takes_a_sequence_of_one_size():
    assert nn.ResidualLayerNorm((6,)).normalized_shape == 6


MODULES = [
    getattr(nn, name)
    for name in nn.__all__
    if isinstance(getattr(nn, name), type) and issubclass(getattr(nn, name), torch_nn.Module)
]
SIZES = {"input_size": 6, "hidden_size": 6, "d_model": 6, "nhead": 3, "embed_dim": 6}
SIZES |= {"num_heads": 3, "num_embeddings": 9, "embedding_dim": 6, "normalized_shape": 6}
SIZES |= {"in_features": 6, "max_positions": 9, "max_distance": 16, "head_dim": 4}
OTHERS = {"num_layers": 3, "output": "sum", "splits": (2, 4), "activation": "tanh", "rank": 2}
OTHERS |= {"padding_idx": 2, "forget_bias": 1.0, "kdim": 4, "vdim": 5, "ignore_index": 0}
OTHERS |= {"scale": 0.5, "eps": 0.25, "layer_norm_eps": 0.25, "rounds": 3, "max_distance": 99}
OTHERS |= {"base": 500, "max_positions": 33, "num_buckets": 16, "dim_feedforward": 8}
NOT_OPTIONS = {"ops", "device", "dtype", "positions", "add_bias_kv", "add_zero_attn"}


# The repr of Rotary leaves out max_positions, which is only the first size of a growing table.
PRINTED = [build for build in MODULES if build is not nn.Rotary]


@pytest.mark.cpu
@pytest.mark.parametrize("build", PRINTED, ids=lambda build: build.__name__)
def test_repr_shows_every_option_that_is_not_the_default(build):
    parameters = dict(inspect.signature(build).parameters)
    required = {n: SIZES[n] for n, p in parameters.items() if p.default is p.empty}
    plain = repr(build(**required))
    assert all(repr(value) in plain for value in required.values())
    assert "ops" not in plain
    if "ops" in parameters:
        assert "ops=reference" in repr(build(**required, ops=reference))
    for name, p in parameters.items():
        if name in NOT_OPTIONS or name in required:
            continue
        value = not p.default if isinstance(p.default, bool) else OTHERS.get(name, 0.125)
        text = repr(build(**{**required, name: value}))
        assert text != plain, name
        # The dropout of added positions is shown by their submodule.
        shown = f"p={value}" if "Positions" in build.__name__ and name == "dropout" else name
        # RelativeBias shows its first arguments without their names.
        assert shown in text or build is nn.RelativeBias, name
        assert str(value) in text, name


@pytest.mark.cpu
def test_a_module_of_operators_is_printed_without_its_path():
    assert repr(fused) == "fusedseq.fused"
    for build in MODULES:
        text = pydoc.plain(pydoc.render_doc(build.__init__))
        assert "/" not in str(inspect.signature(build)), build
        assert ".py" not in text, build


@pytest.mark.cpu
@pytest.mark.parametrize("op", reference.__all__)
def test_help_of_an_operator_has_the_definition_and_what_is_special(op):
    text = pydoc.plain(pydoc.render_doc(getattr(fused, op)))
    assert ".py" not in text
    definition = inspect.getdoc(getattr(reference, op)).split("\n\n")
    for paragraph in definition:
        assert all(line.strip() in text for line in paragraph.splitlines())
    assert inspect.getdoc(getattr(fused, op)).count(definition[0]) == 1
    assert len(getattr(fused, op).__doc__) > len("\n\n".join(definition)) + 20


@pytest.mark.cpu
def test_modules_with_new_options_can_be_copied():
    for build in (lambda: nn.TransformerDecoderLayer(E, N, 20), lambda: nn.Embedding(9, E, 3)):
        module = build()
        assert repr(copy.deepcopy(module)) == repr(module)
