"""MultiheadAttention against torch's module, the layout of its heads, and the inputs it refuses.

The tests run in fp64 (on a GPU in fp32), so that rounding does not matter. The rounding errors of
each dtype are tested for the operators, in test_operators.py.
"""

import copy
import sys

import pytest
import torch
from fusedseq import fused, nn
from fusedseq.nn.heads import heads
from torch import nn as torch_nn

from tests.support.attention_modules import INPUTS, B, E, N, inputs, pair
from tests.support.placement import here

pytestmark = pytest.mark.usefixtures("in_exact_dtype")

MASKS = {
    "none": lambda L, S: {},
    "padding": lambda L, S: {"key_padding_mask": torch.arange(S) >= torch.tensor([[S], [S - 2]])},
    "added padding": lambda L, S: {"key_padding_mask": torch.randn(B, S)},
    "bool": lambda L, S: {"attn_mask": torch.ones(L, S, dtype=torch.bool).triu(1)},
    "float": lambda L, S: {"attn_mask": torch.randn(L, S)},
    "by head": lambda L, S: {"attn_mask": torch.randn(B * N, L, S)},
    "both": lambda L, S: {
        "attn_mask": torch.ones(L, S, dtype=torch.bool).triu(2),
        "key_padding_mask": torch.arange(S) >= torch.tensor([[S], [S - 1]]),
    },
}


@pytest.mark.parametrize("masks", MASKS)
@pytest.mark.parametrize("kind", INPUTS)
@pytest.mark.parametrize("batch_first", [False, True], ids=["LBE", "BLE"])
def test_equals_torch_and_loads_its_state_dict(kind, masks, batch_first, ops):
    theirs, ours = pair(ops, E, N, batch_first=batch_first)
    given, options = inputs(kind, batch_first), MASKS[masks](*INPUTS[kind])
    expected = theirs(*given, **options)
    got = ours(*given, **options, need_weights=True)
    torch.testing.assert_close(got, expected)
    grads = [
        torch.autograd.grad(y[0].square().sum(), [*m.parameters()])
        for y, m in ((got, ours), (expected, theirs))
    ]
    for (name, _), a, b in zip(ours.named_parameters(), *grads, strict=True):
        # A sum with cancellation has the rounding error of its largest terms.
        scale = b.abs().max().item()
        torch.testing.assert_close(
            a,
            b,
            rtol=0,
            atol=16 * scale * torch.finfo(b.dtype).eps,
            msg=lambda text, name=name: f"{name}: {text}",
        )


@pytest.mark.parametrize(
    "options",
    [{"bias": False}, {"kdim": 5, "vdim": 7}, {"kdim": 5, "vdim": 5, "bias": False}],
    ids=str,
)
def test_other_sizes_equal_torch(options, ops):
    theirs, ours = pair(ops, E, N, **options)
    sizes = {k: v for k, v in options.items() if k != "bias"}
    given = inputs("three", **sizes)
    torch.testing.assert_close(
        ours(*given, need_weights=True, average_attn_weights=False),
        theirs(*given, average_attn_weights=False),
    )


@pytest.mark.parametrize("options", [{}, {"kdim": 5}], ids=str)
def test_initialization_equals_torch(options):
    states = []
    for build in (nn.MultiheadAttention, torch_nn.MultiheadAttention):
        torch.manual_seed(3)
        states.append(build(E, N, **options).state_dict())
    torch.testing.assert_close(*states, rtol=0, atol=0)
    assert list(states[0]) == list(states[1])


@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
@pytest.mark.parametrize("batch_first", [False, True], ids=["LBE", "BLE"])
def test_replaces_the_attention_of_torchs_encoder_layer(training, batch_first, ops):
    theirs = torch_nn.TransformerEncoderLayer(E, N, 16, 0.0, batch_first=batch_first).train(
        training
    )
    ours = copy.deepcopy(theirs)
    ours.self_attn = nn.MultiheadAttention(E, N, batch_first=batch_first, ops=ops).train(training)
    ours.load_state_dict(theirs.state_dict())
    (x, _, _), padding = inputs("self", batch_first), torch.arange(5) >= torch.tensor([[5], [3]])
    causal = torch_nn.Transformer.generate_square_subsequent_mask(5).isinf()
    with torch.set_grad_enabled(training):
        for options in (
            {},
            {"src_key_padding_mask": padding},
            {"src_mask": causal, "is_causal": True},
        ):
            torch.testing.assert_close(
                ours(x, **options),
                theirs(x, **options),
                msg=lambda text, options=options: f"{list(options)}: {text}",
            )


def test_causal_is_aligned_at_the_end(ops):
    module = nn.MultiheadAttention(E, N, ops=ops)
    (query, key, _) = inputs("cross")
    mask = torch.ones(4, 6, dtype=torch.bool).triu(6 - 4 + 1)
    torch.testing.assert_close(
        module(query, key, key, is_causal=True), module(query, key, key, attn_mask=mask)
    )


def test_key_lengths_equal_a_padding_mask(ops, positions):
    module = nn.MultiheadAttention(E, N, positions=positions, ops=ops)
    x = torch.randn(5, B, E)
    lengths = torch.tensor([5, 3])
    expected = module(x, x, x, key_padding_mask=torch.arange(5) >= lengths[:, None])
    torch.testing.assert_close(module(x, x, x, key_lengths=lengths), expected)


@pytest.mark.parametrize("kind", INPUTS)
def test_weights_are_the_probabilities_of_the_result(kind, ops, positions):
    """They include dropout, as torch's."""
    module = nn.MultiheadAttention(E, N, 0.4, positions=positions, ops=ops)
    given = inputs(kind)
    y, p = module(*given, need_weights=True, average_attn_weights=False, is_causal=True)
    (v,) = module._project(given[2], 2, 3)
    torch.testing.assert_close(y, module.out_proj((p @ v).permute(2, 0, 1, 3).flatten(2)))
    assert (p == 0).any()


@pytest.mark.cpu
@pytest.mark.parametrize("kind", INPUTS)
@pytest.mark.parametrize("batch_first", [False, True], ids=["LBE", "BLE"])
def test_heads_are_views_of_few_products(kind, batch_first, monkeypatch):
    """Self-attention is one matrix product, cross-attention two.

    Nothing is copied between a product and the operator.
    """
    module = nn.MultiheadAttention(E, N, batch_first=batch_first)
    given = inputs(kind)
    given = tuple(t.transpose(0, 1).contiguous() for t in given) if batch_first else given
    given = {"self": (given[0],) * 3, "cross": (given[0], given[1], given[1]), "three": given}[kind]
    products, seen = [], []

    def linear(*args, original=module._linear):
        products.append(original(*args))
        return products[-1]

    def attention(*args, original=module._attention, **options):
        seen.extend(t.untyped_storage().data_ptr() for t in args)
        seen.append(original(*args, **options))
        return seen[-1]

    monkeypatch.setattr(module, "_linear", linear)
    monkeypatch.setattr(module, "_attention", attention)
    module(*given)
    assert len(products) == {"self": 1, "cross": 2, "three": 3}[kind] + 1
    assert {*seen[:3]} == {t.untyped_storage().data_ptr() for t in products[:-1]}
    assert seen[3].transpose(1, 2).is_contiguous()


@pytest.mark.cpu
@pytest.mark.parametrize("parts", [2, 3])
@pytest.mark.parametrize("rows", [1, 4])
# One query; a short sequence for the packed kernel; and one for the blockwise kernel.
@pytest.mark.parametrize("L", [1, 5, 40])
@pytest.mark.parametrize("batch_first", [False, True], ids=["LBE", "BLE"])
def test_gradients_of_heads_have_the_layout_of_the_projection(
    parts, rows, L, batch_first, monkeypatch
):
    """The gradients that attention writes are used without a copy, and equal copied ones."""
    shape = (rows, L, parts * E) if batch_first else (L, rows, parts * E)
    y = torch.randn(shape, requires_grad=True)
    q = torch.randn(rows, N, 3, E // N, requires_grad=True)

    def gradients():
        *other, k, v = found = heads(y, parts, N, batch_first)
        for t in found:
            t.register_hook(lambda g: made.append(g.untyped_storage().data_ptr()))
        out = fused.attention(*other or [q], k, v)
        return torch.autograd.grad(out.square().sum(), y)[0]

    made: list = []
    dy = gradients()
    assert dy.is_contiguous()
    assert {*made} == {dy.untyped_storage().data_ptr()}
    monkeypatch.setattr(sys.modules[fused.attention.__module__], "shared_projection", lambda *_: 0)
    made = []
    copied = gradients()
    assert len({*made}) == parts
    assert torch.equal(dy, copied)


@pytest.mark.cpu
def test_gradients_of_heads():
    """First and second derivatives, with all parts or only one used."""
    y = torch.randn(2, 3, 3 * E, dtype=torch.float64, requires_grad=True)
    for used in ((0, 1, 2), (1,)):
        assert torch.autograd.gradgradcheck(
            lambda y, used=used: [heads(y, 3, N, True)[i].square() for i in used], (y,)
        )
    assert torch.autograd.gradcheck(lambda y: fused.attention(*heads(y, 3, N, True)), (y,))
    assert torch.autograd.gradgradcheck(lambda y: fused.attention(*heads(y, 3, N, True)), (y,))


# Bad input

X = torch.zeros(5, B, E, dtype=torch.float64)
BAD = [
    # arguments, options, exception, message
    (
        (X.expand(2, 5, B, E), X, X),
        {},
        ValueError,
        r"query must be \(L, B, 12\), .*, got \(2, 5, 2, 12\)",
    ),
    ((X, X[..., :4], X), {}, ValueError, r"key must be \(S, B, 12\), .*, got \(5, 2, 4\)"),
    ((X, X, X[..., :4]), {}, ValueError, r"value must be \(S, B, 12\), .*, got \(5, 2, 4\)"),
    ((X[0], X, X), {}, ValueError, r"key must be .* if no input has a batch dimension, got"),
    ((X, X), {}, TypeError, r"value must be a tensor .*only with a cache\), got NoneType"),
    ((X,), {}, TypeError, r"key must be a tensor .*only with a cache\), got NoneType"),
    (
        (X, X, X),
        {"key_padding_mask": torch.ones(5, B) > 0},
        ValueError,
        r"key_padding_mask must be \(B, S\) = \(2, 5\), got",
    ),
    (
        (X, X, X),
        {"key_padding_mask": torch.ones(B, 5).long()},
        TypeError,
        "key_padding_mask must be bool, True .* got torch.int64",
    ),
    (
        (X, X, X),
        {"attn_mask": torch.ones(5, 4) > 0},
        ValueError,
        r"attn_mask must be \(L, S\) = \(5, 5\), got \(5, 4\)",
    ),
    (
        (X, X, X),
        {"attn_mask": torch.ones(B, 5, 5)},
        ValueError,
        r"attn_mask must be \(B N, L, S\) = \(6, 5, 5\), got",
    ),
]


@pytest.mark.cpu
@pytest.mark.parametrize(
    ("args", "options", "error", "sentence"), BAD, ids=[entry[3][:30] for entry in BAD]
)
def test_bad_input_is_rejected(args, options, error, sentence):
    with pytest.raises(error, match=f"^MultiheadAttention: {sentence}"):
        nn.MultiheadAttention(E, N)(*args, **options)


BAD_SIZES = {
    "MultiheadAttention: embed_dim must be a multiple of num_heads, .* got 12 and 5": lambda: (
        nn.MultiheadAttention(12, 5)
    ),
    r"MultiheadAttention: dropout must be in \[0, 1\], got 1.5": lambda: nn.MultiheadAttention(
        12, 3, 1.5
    ),
    "ALiBi: num_heads must be at least 1, got 0": lambda: nn.ALiBi(0),
    "RelativeBias: num_heads must be at least 1, .* got 3, 2 and 128": lambda: nn.RelativeBias(
        3, 2
    ),
    "RelativeBias: .* max_distance above the 8 .* got 3, 32 and 8": lambda: nn.RelativeBias(
        3, 32, 8
    ),
    "RelativeKeys: max_distance must be at least 0 .* got -1 and 4": lambda: nn.RelativeKeys(-1, 4),
    "Rotary: head_dim must be even and at least 2 unless rotary_dim is given, got 5": lambda: (
        nn.Rotary(5)
    ),
    r"SinusoidalPositions: x must be \(L, B, 6\) .*, got \(4, 2, 5\)": lambda: (
        nn.SinusoidalPositions(6)(torch.zeros(4, 2, 5))
    ),
    "SinusoidalPositions: .* offset at least 0, got .* and -1": lambda: nn.SinusoidalPositions(6)(
        torch.zeros(4, 2, 6), -1
    ),
    r"attention: alibi must be \(N,\) = \(3,\), got \(4,\)": lambda: nn.MultiheadAttention(
        E, N, positions=nn.ALiBi(4)
    )(X, X, X),
}


@pytest.mark.cpu
@pytest.mark.parametrize("sentence", BAD_SIZES)
def test_bad_sizes_are_rejected(sentence):
    with pytest.raises(ValueError, match=f"^{sentence}"):
        BAD_SIZES[sentence]()


# ---- packed sequences and options of the logits

LENGTHS = (3, 7, 1)
CU_SEQLENS = torch.tensor([0, 3, 10, 11])
POSITIONS = {
    "none": lambda: None,
    "alibi": lambda: nn.ALiBi(2),
    "relative bias": lambda: nn.RelativeBias(2),
    "relative keys": lambda: nn.RelativeKeys(3, 4),
    "rotary": lambda: nn.Rotary(4),
}


@pytest.mark.parametrize("batch_first", [False, True])
@pytest.mark.parametrize("positions", POSITIONS)
def test_packed_sequences_equal_the_sequences_alone(positions, batch_first):
    options = {"scale": 0.7, "window": (4, 0), "softcap": 3.0, "sinks": True}
    options["batch_first"] = batch_first
    module = nn.MultiheadAttention(8, 2, positions=POSITIONS[positions](), **options)
    with torch.no_grad():
        module.sinks.copy_(torch.tensor([0.3, -1.0]))
    x = torch.randn(11, 8)
    alone = torch.cat([module(t, t, t, is_causal=True)[0] for t in x.split(LENGTHS)])
    y, weights = module(x, x, x, is_causal=True, cu_seqlens=here(CU_SEQLENS))
    torch.testing.assert_close(y, alone)
    assert weights is None
    nested = torch.nested.nested_tensor_from_jagged(x, here(CU_SEQLENS))
    y = module(nested, nested, nested, is_causal=True)[0]
    assert y.shape == nested.shape
    torch.testing.assert_close(y.values(), alone)
    weight, parameters = torch.randn_like(alone), [*module.parameters()]
    expected = torch.autograd.grad((alone * weight).sum(), parameters)
    found = torch.autograd.grad((y.values() * weight).sum(), parameters)
    torch.testing.assert_close(found, expected)


def test_probabilities_of_packed_sequences_are_dropped_in_training():
    module, x = nn.MultiheadAttention(8, 2, 1.0), torch.randn(11, 8)
    torch.nn.init.normal_(module.out_proj.bias)
    y = module(x, x, x, cu_seqlens=here(CU_SEQLENS))[0]
    assert torch.equal(y, module.out_proj.bias.expand(11, 8))
    y = module.eval()(x, x, x, cu_seqlens=here(CU_SEQLENS))[0]
    assert not torch.equal(y, module.out_proj.bias.expand(11, 8))


def test_packed_sequences_are_aligned_at_their_ends():
    module = nn.MultiheadAttention(E, N)
    x, ends = torch.randn(5, E), torch.tensor([0, 2, 5])
    for alignment in (None, "end"):
        module(x, x, x, is_causal=True, causal_alignment=alignment, cu_seqlens=ends)
    for alignment in ("start", "nonsense"):
        with pytest.raises(ValueError, match="causal_alignment must be 'end' for packed"):
            module(x, x, x, is_causal=True, causal_alignment=alignment, cu_seqlens=ends)


def test_nested_keys_may_have_other_lengths_than_the_queries():
    module = nn.MultiheadAttention(8, 2)
    query = torch.nested.nested_tensor_from_jagged(torch.randn(11, 8), here(CU_SEQLENS))
    memory = torch.nested.nested_tensor_from_jagged(torch.randn(9, 8), torch.tensor([0, 2, 3, 9]))
    y = module(query, memory, memory)[0]
    parts = zip(query.unbind(), memory.unbind(), strict=True)
    alone = torch.cat([module(q, m, m)[0] for q, m in parts])
    torch.testing.assert_close(y.values(), alone)
    with pytest.raises(ValueError, match="positions must be None for packed sequences whose keys"):
        nn.MultiheadAttention(8, 2, positions=nn.ALiBi(2))(query, memory, memory)


def test_options_of_the_logits_are_those_of_the_operator():
    """Also of the probabilities, which sum to less than 1 beside a sink."""
    torch.manual_seed(0)
    x = torch.randn(5, 2, 8)
    module = nn.MultiheadAttention(8, 2, window=(1, 1), softcap=2.0, sinks=True)
    y, probability = module(x, x, x, need_weights=True, average_attn_weights=False)
    (v,) = module._project(x, 2, 3)
    torch.testing.assert_close(y, module.out_proj((probability @ v).permute(2, 0, 1, 3).flatten(2)))
    y, weights = module(x, x, x, need_weights=True)
    assert ((weights != 0) == ((torch.arange(5)[:, None] - torch.arange(5)).abs() <= 1)).all()
    assert (weights.sum(-1) < 0.99).all()
    y.sum().backward()
    assert module.sinks.grad.any()
    assert "window=(1, 1), softcap=2.0, sinks=True" in repr(module)
    plain = nn.MultiheadAttention(8, 2)
    assert plain.sinks is None
    assert "sinks" not in plain.state_dict()


@pytest.mark.parametrize(
    "options", [{"key_lengths": [3]}, {"attn_mask": torch.zeros(3, 3)}, {"need_weights": True}]
)
def test_arguments_that_packed_sequences_do_not_have_are_refused(options):
    x = torch.randn(11, 8)
    with pytest.raises(ValueError, match="must be None for packed sequences"):
        nn.MultiheadAttention(8, 2)(x, x, x, cu_seqlens=here(CU_SEQLENS), **options)


def test_a_module_that_returns_weights_refuses_packed_sequences():
    x = torch.randn(11, 8)
    module = nn.MultiheadAttention(8, 2, need_weights=True)
    with pytest.raises(ValueError, match="must be None for packed sequences"):
        module(x, x, x, cu_seqlens=here(CU_SEQLENS))
    y, weights = module(x, x, x, need_weights=False, cu_seqlens=here(CU_SEQLENS))
    assert y.shape == x.shape
    assert weights is None


def test_the_longest_length_belongs_to_packed_sequences():
    x = torch.randn(5, 3, 8)
    with pytest.raises(ValueError, match=r"max_seqlen must be None without cu_seqlens, got 5"):
        nn.MultiheadAttention(8, 2)(x, x, x, max_seqlen=5)


@pytest.mark.cpu
def test_torchs_dynamic_quantization_leaves_the_output_layer_as_it_is():
    """As it does that of torch's own module; it rounds the other layers of the block."""
    layer = nn.TransformerEncoderLayer(16, 2, 32).eval().float()
    x = torch.randn(5, 3, 16, dtype=torch.float32)
    quantized = torch.ao.quantization.quantize_dynamic(layer, {torch.nn.Linear})
    assert quantized(x).isfinite().all()
    assert torch.equal(quantized.self_attn(x, x, x)[0], layer.self_attn(x, x, x)[0])
