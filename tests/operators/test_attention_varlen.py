"""Windows, softcap and sinks of `attention`, and packed sequences: `attention_varlen` and nested
tensors."""

import math

import pytest
import torch
from fusedseq import fused, nn, reference
from fusedseq.testing import check, run

from tests.support.attention_calls import OPERATORS, assert_same, qkv, with_gradients
from tests.support.placement import exact, here

pytestmark = pytest.mark.usefixtures("on_device")
VARLEN = pytest.mark.parametrize(
    "op", [fused.attention_varlen, reference.attention_varlen], ids=["fused", "reference"]
)
LENGTHS = (5, 0, 33, 1, 60)


def ends(lengths):
    return torch.tensor([0, *lengths]).cumsum(0)


def packed(lengths, N, D, N_kv=None, dtype=torch.float32):
    """Returns random q (rows, N, D), and k and v (rows, N_kv, D)."""
    return [torch.randn(sum(lengths), n, D, dtype=dtype) for n in (N, N_kv or N, N_kv or N)]


def sequences(x, lengths):
    """Returns sequence b of packed rows as (1, N, L, D), for every b."""
    return [part.transpose(0, 1)[None] for part in x.split(list(lengths))]


# ---- windows


@OPERATORS
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("left", "right"), [(0, 0), (3, None), (-1, 5), (20, 7), (200, 300)])
@pytest.mark.parametrize(("L", "S"), [(7, 6), (1, 50), (60, 75), (150, 140)])
def test_a_window_is_a_mask(L, S, left, right, causal, op):
    q, k, v = qkv(2, 2, L, S, 6, dtype=exact())
    i, j = torch.arange(L)[:, None] + S - L, torch.arange(S)
    mask = torch.ones(L, S, dtype=torch.bool)
    mask &= j >= i - left if left != -1 else mask
    mask &= j <= i + right if right is not None else mask
    expected = with_gradients(q, k, v, op=reference.attention, mask=mask, causal=causal)
    got = with_gradients(q, k, v, op=op, window=(left, right), causal=causal)
    for y, expected_y in zip(got, expected, strict=True):
        torch.testing.assert_close(y, expected_y)


@pytest.mark.parametrize("L", [1, 3, 40, 300])
def test_keys_outside_of_the_window_of_all_queries_have_no_gradient_and_no_influence(L):
    q, k, v = qkv(1, 2, L, 400, 8)
    options = {"window": (10, 5)}
    hidden = torch.arange(400) < 400 - L - 10
    first = with_gradients(q, k, v, **options)
    other = [t.where(~here(hidden)[:, None], 1e4 * torch.randn_like(t)) for t in (k, v)]
    assert_same(with_gradients(q, *other, **options), first)
    for t in first[2:]:
        assert not t[:, :, hidden].any()
        assert t[:, :, ~hidden].any()


# ---- softcap and sinks


@OPERATORS
def test_softcap_is_before_bias_and_mask(op):
    """As in transformers' Gemma 2 and in flash-attn."""
    q, k, v = qkv(2, 2, 20, 30, 6, dtype=exact())
    bias, mask = torch.randn(20, 30, dtype=q.dtype), torch.rand(20, 30) < 0.8
    logits = 2.5 * torch.tanh(0.7 * q @ k.mT / 2.5) + bias
    p = logits.masked_fill(~mask, -math.inf).softmax(-1)
    options = here({"scale": 0.7, "softcap": 2.5, "bias": bias, "mask": mask})
    torch.testing.assert_close(op(q, k, v, **options), p @ v)


@OPERATORS
@pytest.mark.parametrize(("L", "S"), [(5, 7), (1, 40), (40, 50)])
def test_a_sink_is_a_key_with_a_value_of_zero(L, S, op):
    q, k, v = qkv(2, 3, L, S, 6, dtype=exact())
    sinks = torch.randn(3, dtype=q.dtype).requires_grad_()
    column = sinks[:, None, None].expand(2, 3, L, 1)
    logits = torch.cat([q @ k.mT / 6**0.5, column], dim=-1)
    expected = logits.softmax(-1)[..., :-1] @ v
    y = op(q, k, v, sinks=sinks)
    torch.testing.assert_close(y, expected)
    dy = torch.randn_like(y)
    grads = [torch.autograd.grad(out, sinks, dy, retain_graph=True)[0] for out in (y, expected)]
    torch.testing.assert_close(*grads)


@OPERATORS
@pytest.mark.parametrize("L", [2, 30])
def test_dropout_does_not_touch_the_sinks(L, op):
    """With every key dropped the result is 0; the sum of what is kept is that without sinks, less
    the sinks' probability."""
    q, k, v = qkv(1, 1, L, 20, 4, dtype=exact())
    ones, sinks = torch.ones_like(v), torch.tensor([1.5], dtype=q.dtype)
    kept = op(q, k, ones, dropout=0.4, seed=3)
    lse = (q @ k.mT / 2).logsumexp(-1, keepdim=True)
    expected = kept * torch.sigmoid(lse - sinks)
    torch.testing.assert_close(op(q, k, ones, dropout=0.4, seed=3, sinks=sinks), expected)


@OPERATORS
@pytest.mark.parametrize("L", [3, 30])
def test_a_query_without_a_key_is_zero_beside_a_sink_and_gives_it_no_gradient(L, op):
    q, k, v = qkv(2, 2, L, 11, 4)
    sinks = torch.randn(2).requires_grad_()
    y = op(q, k, v, sinks=sinks, key_lengths=torch.tensor([0, 11]))
    assert not y[0].any()
    assert y[1].any()
    (of_blind,) = torch.autograd.grad(y[0].sum(), sinks, retain_graph=True)
    assert not of_blind.any()
    (of_others,) = torch.autograd.grad(y[1].sum(), sinks)
    assert of_others.all()


@pytest.mark.parametrize("L", [3, 30])
def test_sinks_of_minus_infinity_change_nothing(L):
    q, k, v = qkv(2, 2, L, 11, 4, dtype=exact())
    expected = with_gradients(q, k, v)
    y, *grads = with_gradients(q, k, v, sinks=torch.full((2,), -math.inf, dtype=q.dtype))
    for got, wanted in zip([y, *grads[:3]], expected, strict=True):
        torch.testing.assert_close(got, wanted)
    assert not grads[3].any()


# ---- packed sequences

OPTIONS = {
    "plain": {},
    "causal": {"causal": True},
    "window": {"window": (7, 2)},
    "logits": {"softcap": 2.0, "alibi": torch.tensor([0.5, 0.1]), "scale": 0.7},
    "causal window": {"causal": True, "window": (9, 0)},
}


@VARLEN
@pytest.mark.parametrize("options", OPTIONS)
def test_packed_sequences_equal_the_sequences_alone(options, op):
    options = here(OPTIONS[options])
    queries, keys = (4, 0, 33, 1, 60), (9, 3, 33, 8, 60)
    q, _, _ = packed(queries, 2, 6, dtype=exact())
    _, k, v = packed(keys, 2, 6, dtype=exact())
    got, grads = run(op, (q, k, v, ends(queries), ends(keys)), options)
    parts = [sequences(q, queries), sequences(k, keys), sequences(v, keys)]
    alone = [with_gradients(*args, **options) for args in zip(*parts, strict=True)]
    expected = [torch.cat([t[0].transpose(0, 1) for t in ts]) for ts in zip(*alone, strict=True)]
    torch.testing.assert_close(got[0], expected[0])
    assert len(grads) == 3


@VARLEN
@pytest.mark.parametrize("options", [{}, {"dropout": 0.4, "seed": 3}], ids=["plain", "dropout"])
def test_packed_sequences_equal_the_padded_batch(options, op):
    """The dropout's mask is that of the padded batch, too."""
    rows, L = packed(LENGTHS, 2, 6, dtype=exact()), max(LENGTHS)
    padded = []
    for x in rows:
        batch = x.new_zeros(len(LENGTHS), 2, L, 6)
        for b, part in enumerate(sequences(x, LENGTHS)):
            batch[b, :, : part.size(2)] = part[0]
        padded.append(batch)
    expected = reference.attention(*padded, key_lengths=torch.tensor(LENGTHS), **options)
    y = op(*rows, ends(LENGTHS), ends(LENGTHS), **options)
    for b, part in enumerate(sequences(y, LENGTHS)):
        torch.testing.assert_close(part[0], expected[b, :, : part.size(2)])


def test_other_sequences_do_not_matter():
    """Bit for bit, forward and backward, where the longest sequence stays as long."""
    q, k, v = packed(LENGTHS, 2, 6)
    cu = ends(LENGTHS)
    first, grads = run(fused.attention_varlen, (q, k, v, cu, cu), {})
    own = torch.zeros(len(q), dtype=torch.bool)
    own[5:38] = True
    others = [t.where(here(own)[:, None, None], torch.randn_like(t)) for t in (q, k, v)]
    second, other_grads = run(fused.attention_varlen, (*others, cu, cu), {})
    assert torch.equal(first[0][own], second[0][own])
    assert not torch.equal(first[0][~own], second[0][~own])
    assert len(grads) == len(other_grads) == 3


@pytest.mark.parametrize("type", [torch.int32, torch.int64])
def test_boundaries_of_both_integer_types(type):
    q, k, v = packed((3, 4), 2, 6)
    cu = ends((3, 4))
    expected = fused.attention_varlen(q, k, v, cu, cu)
    assert torch.equal(fused.attention_varlen(q, k, v, cu.to(type), cu.to(type)), expected)


def test_compiled_packed_sequences_are_one_graph():
    q, k, v = packed(LENGTHS, 2, 6)
    cu = ends(LENGTHS)

    def function(q, k, v, cu):
        return fused.attention_varlen(q, k, v, cu, cu, 60, 60, causal=True, window=(9, 0))

    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(q, k, v, cu), function(q, k, v, cu))


# ---- nested tensors


@pytest.mark.parametrize("options", ["plain", "causal window"])
def test_nested_tensors_are_packed_sequences(options):
    options = OPTIONS[options]
    lengths = (5, 33, 1, 60)
    rows = packed(lengths, 2, 6)
    cu = ends(lengths)
    weight = torch.randn_like(rows[0])
    expected, grads = run(
        fused.attention_varlen, (*rows, cu, cu), options, needs=[0, 1, 2], grad_outputs=[weight]
    )
    leaves = [x.clone().requires_grad_() for x in rows]
    q = torch.nested.nested_tensor_from_jagged(leaves[0], here(cu))
    k, v = (torch.nested.nested_tensor_from_jagged(x, q.offsets()) for x in leaves[1:])
    y = fused.attention(*(t.transpose(1, 2) for t in (q, k, v)), **options)
    assert y.is_nested
    assert y.shape == q.transpose(1, 2).shape
    of_rows = y.transpose(1, 2).values()
    assert torch.equal(of_rows, expected[0])
    found = torch.autograd.grad(of_rows, leaves, weight)
    assert all(map(torch.equal, found, grads))
    assert (y + q.transpose(1, 2)).shape == y.shape


def test_nested_tensors_as_scaled_dot_product_attention():
    x = torch.nested.nested_tensor(
        [torch.randn(n, 2, 8) for n in (3, 7, 1)], layout=torch.jagged
    ).transpose(1, 2)
    expected = torch.nn.functional.scaled_dot_product_attention(x, x, x)
    got = fused.attention(x, x, x)
    torch.testing.assert_close(got.transpose(1, 2).values(), expected.transpose(1, 2).values())


@pytest.mark.cpu
def test_nested_tensors_with_holes_are_read_without_them():
    """As torch.nested.narrow makes them: views of a padded batch."""
    starts, lengths = torch.tensor([0, 2, 1]), torch.tensor([4, 3, 5])
    x = torch.nested.narrow(torch.randn(3, 6, 8), 1, starts, lengths, layout=torch.jagged)
    heads = [t.unflatten(-1, (2, 4)).transpose(1, 2) for t in (x, x.contiguous())]
    found, expected = (fused.attention(q, q, q).transpose(1, 2).values() for q in heads)
    torch.testing.assert_close(found, expected)
    module = nn.MultiheadAttention(8, 2, batch_first=True)
    found, expected = (module(t, t, t)[0].values() for t in (x, x.contiguous()))
    torch.testing.assert_close(found, expected)


# ---- errors

GOOD = {"q": (7, 2, 6), "k": (7, 2, 6), "v": (7, 2, 6)}
ERRORS = [
    ({"cu_seqlens_q": torch.tensor([0, 3, 6])}, ValueError, "cu_seqlens_q must rise from 0 to"),
    ({"cu_seqlens_k": torch.tensor([1, 3, 7])}, ValueError, "cu_seqlens_k must rise from 0 to"),
    ({"cu_seqlens_q": torch.tensor([0, 9, 7])}, ValueError, "cu_seqlens_q must rise from 0 to"),
    ({"cu_seqlens_q": torch.tensor([0.0, 7.0])}, TypeError, "cu_seqlens_q must be int64 or int32"),
    ({"cu_seqlens_k": torch.tensor([0, 7])}, ValueError, r"cu_seqlens_k must be \(B \+ 1,\)"),
    ({"cu_seqlens_q": [0, 3, 7]}, TypeError, "cu_seqlens_q must be a tensor"),
    ({"max_seqlen_q": 3}, ValueError, "max_seqlen_q must be at least the length of the longest"),
    ({"max_seqlen_k": 2.5}, TypeError, "max_seqlen_k must be a whole number"),
    ({"q": torch.zeros(1, 7, 2, 6)}, ValueError, r"q must be \(queries, N, D\)"),
    ({"window": (1, 2, 3)}, TypeError, r"window must be \(left, right\) or None"),
    ({"window": (1.5, 2)}, TypeError, "window must be two whole numbers or None"),
    ({"window": (-2, 2)}, ValueError, "window must be two numbers of at least -1"),
    ({"softcap": -1.0}, ValueError, "softcap must be at least 0"),
    ({"softcap": "1"}, TypeError, "softcap must be a number"),
    ({"sinks": torch.zeros(3)}, ValueError, r"sinks must be \(N,\) = \(2,\)"),
    ({"sinks": torch.zeros(2, dtype=torch.float64)}, TypeError, "sinks must be of the dtype of q"),
]


@pytest.mark.parametrize(("wrong", "error", "message"), ERRORS, ids=lambda x: str(x)[:40])
def test_wrong_arguments_are_named(wrong, error, message):
    if "max_seqlen_q" in wrong and torch.get_default_device().type == "cuda":
        pytest.skip("with max_seqlen given, no value is read back from a GPU")
    cu = torch.tensor([0, 3, 7])
    arguments = {name: torch.randn(shape) for name, shape in GOOD.items()}
    arguments |= {"cu_seqlens_q": cu, "cu_seqlens_k": cu} | wrong
    with pytest.raises(error, match=message):
        fused.attention_varlen(**here(arguments))


@pytest.mark.parametrize(
    "cu", [[0, 3, 8], [0, 5, 3, 7], [1, 7], [0, 3, 6], [-1, 7]], ids=lambda cu: str(cu)
)
@pytest.mark.cpu  # on a GPU its values would have to be copied from the device
def test_the_registered_operator_reads_no_foreign_memory(cu):
    x, cu = torch.randn(1, 2, 7, 6), torch.tensor(cu)
    arguments = {"q": x, "k": x, "v": x, "cu_seqlens_q": cu, "cu_seqlens_k": cu}
    arguments |= dict.fromkeys(("bias", "mask", "key_lengths", "alibi", "relative_keys", "rope"))
    arguments |= dict.fromkeys(("key_rows", "seed", "sinks"))
    settings = {"rope_interleaved": True, "scale": 1.0, "causal": False, "offset": 0}
    settings |= {"dropout": 0.0, "softcap": 0.0, "window_left": -1, "window_right": -1}
    with pytest.raises(RuntimeError, match="cu_seqlens_q"):
        torch.ops.fusedseq.attention(**arguments, **settings, max_seqlen_q=7, max_seqlen_k=7)


def test_nested_tensors_of_another_kind_are_refused():
    q = torch.nested.nested_tensor([torch.randn(n, 2, 8) for n in (3, 7)], layout=torch.jagged)
    with pytest.raises(ValueError, match=r"q must be a nested tensor \(B, N, L\*, D\)"):
        fused.attention(q, q, q)
    x = q.transpose(1, 2)
    with pytest.raises(ValueError, match="key_lengths must be None with nested tensors"):
        fused.attention(x, x, x, key_lengths=[1, 2])


def test_an_error_of_all_options_together_is_within_the_oracles():
    q, k, v = packed(LENGTHS, 4, 10, N_kv=2)
    options = {"window": (20, 3), "softcap": 1.5, "sinks": torch.randn(4), "dropout": 0.2}
    check("attention_varlen", (q, k, v, ends(LENGTHS), ends(LENGTHS)), options | {"seed": 5})


def test_heads_without_elements():
    q, k = torch.zeros(5, 2, 0), torch.zeros(4, 2, 0)
    boundaries = torch.tensor([0, 2, 5]), torch.tensor([0, 3, 4])
    assert fused.attention_varlen(q, k, k, *boundaries).shape == q.shape


@pytest.mark.parametrize(
    ("k", "message"),
    [
        ((5, 2, 4), r"k must be \(keys, N_kv, D\) with D = 8 and an N_kv that divides N = 2, got "),
        ((5, 3, 8), r"k must be \(keys, N_kv, D\) with D = 8 and an N_kv that divides N = 2, got "),
    ],
)
def test_a_wrong_shape_is_named_as_it_was_given(k, message, device):
    q, k = torch.randn(5, 2, 8, device=device), torch.randn(k, device=device)
    with pytest.raises(ValueError, match=r"^attention_varlen: " + message):
        fused.attention_varlen(q, k, k, *(2 * [here(torch.tensor([0, 5]))]))
