"""What attention means: what may not matter does not, bit for bit; what the papers say holds, written out again here."""

import math
import re

import pytest
import torch
from fusedseq import fused, nn, reference
from fusedseq.testing import CASES, check, run
from placement import exact, here
from torch.nn import functional as F

from bench import roofline

pytestmark = pytest.mark.usefixtures("on_device")
INF, NAN = math.inf, math.nan
OPERATORS = pytest.mark.parametrize("op", [fused.attention, reference.attention], ids=["fused", "reference"])


def qkv(B, N, L, S, D, N_kv=None, dtype=torch.float32):
    return [torch.randn(B, n, length, D, dtype=dtype) for n, length in ((N, L), (N_kv or N, S), (N_kv or N, S))]


def with_gradients(*args, op=fused.attention, **options):
    """The result and the gradients of q, k, v and of the bias and relative_keys there are."""
    results, grads = run(op, args, here(options))
    return [*results, *grads]


def assert_same(got, wanted):
    for i, (a, b) in enumerate(zip(got, wanted, strict=True)):
        assert torch.equal(a, b), f"tensor {i}: {(a != b).sum()} of {a.numel()} differ"


# ------------------------------------------------------------------------------------- what may not matter does not


@OPERATORS
@pytest.mark.parametrize(("L", "S", "D"), [(7, 7, 5), (3, 9, 5), (90, 90, 20)])
def test_the_future_does_not_matter(L, S, D, op):
    q, k, v = qkv(2, 2, L, S, D)
    wanted = op(q, k, v, causal=True)
    for i in (0, L // 2, L - 1):
        last = i + S - L
        k_, v_ = k.clone(), v.clone()
        k_[:, :, last + 1 :], v_[:, :, last + 1 :] = 1e4 * torch.randn(2, *k_[:, :, last + 1 :].shape)
        assert torch.equal(op(q, k_, v_, causal=True)[:, :, : i + 1], wanted[:, :, : i + 1])
        leaves = [t.clone().requires_grad_() for t in (k, v)]
        for g in torch.autograd.grad(op(q, *leaves, causal=True)[:, :, : i + 1].sum(), leaves):
            assert not g[:, :, last + 1 :].any()


# Of 11 keys the last four; for the second batch row all of them.
HIDDEN = torch.arange(11) >= torch.tensor([[7], [0], [11]])
WAYS = {
    "mask": {"mask": ~HIDDEN[:, None, None]},
    "lengths": {"key_lengths": torch.tensor([7, 0, 11])},
    "bias": {"bias": torch.zeros(3, 1, 1, 11).masked_fill(HIDDEN[:, None, None], -INF)},
}
BESIDES = {"alone": {}, "all": {"alibi": torch.tensor([0.5, 0.1]), "dropout": 0.3, "seed": 5, "causal": True}}


@OPERATORS
@pytest.mark.parametrize("besides", BESIDES)
@pytest.mark.parametrize("way", WAYS)
def test_masked_keys_do_not_matter(way, besides, op):
    """Nor do they have a gradient; and a row that sees none is 0 with gradients 0."""
    q, k, v = qkv(3, 2, 5, 11, 6)
    options = {**WAYS[way], **BESIDES[besides]}
    first = with_gradients(q, k, v, op=op, **options)
    hidden = here(HIDDEN)[:, None, :, None]
    k_, v_ = (t.where(~hidden, 1e6 * torch.randn_like(t)) for t in (k, v))
    assert_same(with_gradients(q, k_, v_, op=op, **options), first)
    y, dq, dk, dv, *dbias = first
    for t in (dk, dv):
        assert not t.where(hidden, 0).any()
    for t in (y[1], dq[1], *(t[1] for t in dbias)):
        assert not t.any()
    assert all(t[0].any() and t.isfinite().all() for t in first)


@pytest.mark.parametrize("value", [INF, NAN])
@pytest.mark.parametrize("L", [1, 5, 30])
def test_keys_behind_the_lengths_are_never_looked_at(L, dtype, value):
    """What stands there may be no number at all: memory that nothing was written to. A mask can't promise that."""
    q, k, v = qkv(3, 2, L, 11, 6, dtype=dtype)
    lengths = torch.tensor([7, 0, 11])
    wanted = with_gradients(q, k, v, key_lengths=lengths)
    k_, v_ = (t.masked_fill(here(HIDDEN)[:, None, :, None], value) for t in (k, v))
    assert_same(with_gradients(q, k_, v_, key_lengths=lengths), wanted)


@OPERATORS
@pytest.mark.parametrize("S", [3, 7, 11, 20])
def test_nan_in_a_query_comes_out(S, op):
    """It is no mask: a query of NaN must not look like one that sees nothing."""
    q, k, v = qkv(2, 2, 5, S, 3)
    q[1, 0, 2] = NAN
    y, *grads = with_gradients(q, k, v, op=op)
    assert y[1, 0, 2].isnan().all()
    assert y.isnan().sum() == 3
    assert grads[0][1, 0, 2].isnan().all()


BLIND = {  # the second of three queries, for each way to mask; or all of them
    "mask": {"mask": torch.tensor([True, False, True])[:, None].expand(3, 4)},
    "bias": {"bias": torch.tensor([0.0, -INF, 0.0])[:, None].expand(3, 4).clone()},
    "all by lengths": {"key_lengths": torch.zeros(2, dtype=torch.int64)},
    "all by causality": {"causal": True, "offset": -3},
    "all by a scalar": {"mask": torch.tensor(False)},
}


@OPERATORS
@pytest.mark.parametrize("dropout", [0.0, 0.4])
@pytest.mark.parametrize("way", BLIND)
def test_a_query_without_a_key_is_exactly_zero(way, dropout, op):
    y, dq, dk, dv, *dbias = with_gradients(*qkv(2, 2, 3, 4, 5), op=op, **BLIND[way], dropout=dropout, seed=2)
    if way.startswith("all"):
        assert not any(t.any() for t in (y, dq, dk, dv))
        return
    for t in (y, dq):
        assert not t[:, :, 1].any()
        assert t[:, :, [0, 2]].any()
    assert all(t.isfinite().all() for t in (dk, dv, *dbias))
    assert not any(t[1].any() for t in dbias)


@pytest.mark.parametrize("options", [{}, {"causal": True}, {"alibi": torch.tensor([0.3, 0.2])}], ids=str)
def test_a_padded_batch_equals_its_rows_alone(options):
    """Padded queries and keys; a row's queries end where its keys do."""
    q, k, v = qkv(3, 2, 40, 40, 6, dtype=exact())
    lengths = torch.tensor([40, 17, 1])
    options = here(options)
    y = fused.attention(q, k, v, key_lengths=lengths, **options)
    for b, n in enumerate(lengths):
        alone = fused.attention(*(t[b : b + 1, :, :n] for t in (q, k, v)), **options)
        torch.testing.assert_close(y[b : b + 1, :, :n], alone)


@OPERATORS
def test_a_bias_constant_over_the_keys_has_no_gradient(op):
    """softmax(x + c) = softmax(x): what is left is rounding."""
    args, bias = qkv(2, 3, 6, 70, 8), torch.randn(2, 3, 6, 1)
    y, *_, dbias = with_gradients(*args, op=op, bias=bias)
    torch.testing.assert_close(y, op(*args))
    assert dbias.abs().max() <= 70 * torch.finfo(torch.float32).eps


# ------------------------------------------------------------------------------------------------- the papers


def softmax_of(logits, v):
    """logits: a function of (b, n, i, j); one number at a time."""
    B, N, S, D = v.shape
    L = logits.queries
    y = torch.zeros(B, N, L, D, dtype=exact())
    for b in range(B):
        for n in range(N):
            for i in range(L):
                e = [math.exp(logits(b, n, i, j)) for j in range(S)]
                y[b, n, i] = sum(e_j / sum(e) * v[b, n, j] for j, e_j in enumerate(e))
    return y


def dot(a, b):
    return sum(x * y for x, y in zip(a.tolist(), b.tolist(), strict=True))


SIZES = B, N, L, D = 2, 2, 5, 6


def papers(q, k):
    """{name: (the operator's options, the paper's logit of (b, n, i, j))}"""
    slopes, table = torch.tensor([0.5, 0.25], dtype=exact()), torch.randn(2 * 2 + 1, D, dtype=exact())
    scalars = torch.randn(N, 2 * L - 1, dtype=exact())
    rates = [10000 ** (-2 * m / D) for m in range(D // 2)]
    rope = [[f(p * rate) for rate in rates for f in (math.cos, math.sin)] for p in range(L)]
    j_minus_i = torch.arange(L) - torch.arange(L)[:, None]

    def alibi(b, n, i, j):  # Press et al., 2022: q_i k_j - m |i - j|
        return dot(q[b, n, i], k[b, n, j]) / math.sqrt(D) - slopes[n].item() * abs(i - j)

    def t5(b, n, i, j):  # Raffel et al., 2020: a scalar of the distance is added to the logit
        return dot(q[b, n, i], k[b, n, j]) / math.sqrt(D) + scalars[n, j - i + L - 1].item()

    def shaw(b, n, i, j):  # Shaw et al., 2018, equations 3 and 4
        relation = table[2 + max(-2, min(2, j - i))]
        return dot(q[b, n, i], k[b, n, j] + relation) / math.sqrt(D)

    def roformer(b, n, i, j):  # Su et al., 2021, equation 12: Re[q k* e^(i (m - n) theta)]
        pairs = ([complex(*pair) for pair in t.unflatten(0, (-1, 2)).tolist()] for t in (q[b, n, i], k[b, n, j]))
        turned = [x * y.conjugate() * complex(math.cos((i - j) * rate), math.sin((i - j) * rate))
                  for x, y, rate in zip(*pairs, rates, strict=True)]  # fmt: skip
        return sum(z.real for z in turned) / math.sqrt(D)

    return {
        "alibi": ({"alibi": slopes}, alibi),
        "t5": ({"bias": scalars[:, j_minus_i + L - 1][None]}, t5),
        "shaw": ({"relative_keys": table}, shaw),
        "rope": ({"rope": torch.tensor(rope, dtype=exact())}, roformer),
    }


@OPERATORS
@pytest.mark.parametrize("name", ["alibi", "t5", "shaw", "rope"])
def test_the_published_formula(name, op):
    q, k, v = qkv(B, N, L, L, D, dtype=exact())
    options, logit = papers(q, k)[name]
    logit.queries = L
    torch.testing.assert_close(op(q, k, v, **options), softmax_of(logit, v))


@OPERATORS
def test_rope_depends_on_distance_alone(op):
    """The same queries and keys farther on, behind keys that nobody sees."""
    q, k, v = qkv(2, 2, 5, 6, 8, dtype=exact())
    angles = torch.outer(torch.arange(40.0), 10000 ** (-torch.arange(0.0, 8, 2) / 8)).to(exact())
    rope = torch.stack([angles.cos(), angles.sin()], -1).flatten(1)
    wanted = op(q, k, v, rope=rope, causal=True)
    assert not torch.allclose(wanted, op(q, k, v, rope=rope, causal=True, offset=0))
    for shift in (1, 9):
        k_, v_ = (torch.cat([torch.randn(2, 2, shift, 8).to(exact()), t], dim=2) for t in (k, v))
        mask = torch.arange(6 + shift) >= shift
        torch.testing.assert_close(op(q, k_, v_, rope=rope, causal=True, mask=mask), wanted)


def test_dropout_is_dropout_masks():
    """With the identity for values the result is the probabilities."""
    q, k, _ = qkv(2, 3, 7, 21, 21)
    eye = torch.eye(21).expand(2, 3, 21, 21)
    for p, seed in ((0.3, 5), (0.9, -1), (0.5, torch.tensor(2**40))):
        plain, dropped = fused.attention(q, k, eye), fused.attention(q, k, eye, dropout=p, seed=seed)
        keep = fused.dropout_mask(seed, p, (2, 3, 7, 21))
        assert torch.equal(dropped != 0, keep)
        torch.testing.assert_close(dropped, torch.where(keep, plain / (1 - p), 0))


# -------------------------------------------------------------------------------------------- decoding, grouped heads

POSITIONS = {
    "none": {},
    "alibi": {"alibi": torch.tensor([0.5, 0.1, 0.2])},
    "keys": {"relative_keys": torch.randn(5, 4).double()},
    "rope": {"rope": torch.randn(12, 4).double()},  # any table will do
    "bias": {"bias": torch.randn(3, 9, 9).double()},
}


def at(options, i, S):
    """The options of query i alone with the first S keys."""
    return {**options, **({"bias": options["bias"][:, i : i + 1, :S]} if "bias" in options else {})}


@OPERATORS
@pytest.mark.parametrize("name", POSITIONS)
def test_cached_decoding_equals_full(name, op):
    q, k, v = qkv(2, 3, 9, 9, 4, dtype=exact())
    options = here(POSITIONS[name], exact())
    wanted = op(q, k, v, causal=True, **options)
    for i in range(9):
        one = op(q[:, :, i : i + 1], k[:, :, : i + 1], v[:, :, : i + 1], causal=True, **at(options, i, i + 1))
        torch.testing.assert_close(one, wanted[:, :, i : i + 1])


@OPERATORS
@pytest.mark.parametrize("name", POSITIONS)
@pytest.mark.parametrize("N_kv", [3, 1])
def test_a_beams_table_equals_copied_caches(name, N_kv, op):
    """Caches of four rows for two hypotheses, with memory for more positions than there are."""
    _, k, v = qkv(4, 3, 1, 12, 4, N_kv, dtype=exact())
    q, rows = torch.randn(2, 3, 1, 4).to(exact()), torch.randint(4, (2, 9))
    options = at(here(POSITIONS[name], exact()), 8, 9)
    copies = [torch.stack([torch.stack([t[r, :, j] for j, r in enumerate(row)], 1) for row in rows]) for t in (k, v)]
    lengths = torch.tensor([9, 4])
    got = op(q, k, v, key_rows=rows, key_lengths=lengths, causal=True, **options)
    torch.testing.assert_close(got, op(q, *copies, key_lengths=lengths, causal=True, **options))


@pytest.mark.parametrize("N_kv", [1, 2])
def test_grouped_queries_equal_repeated_heads(N_kv):
    q, k, v = qkv(2, 4, 5, 7, 6, N_kv, dtype=exact())
    options = {"causal": True, "dropout": 0.2, "seed": 3, "alibi": torch.tensor([0.1, 0.2, 0.3, 0.4])}
    y, dq, dk, dv = with_gradients(q, k, v, **options)
    wanted = with_gradients(q, *(t.repeat_interleave(4 // N_kv, 1) for t in (k, v)), **options)
    grouped = [t.unflatten(1, (N_kv, -1)).sum(2) for t in wanted[2:]]
    torch.testing.assert_close([y, dq, dk, dv], [*wanted[:2], *grouped])


# ------------------------------------------------------------------------------------------- torch's, dtypes, bits

TORCHS = {  # ours: torch's
    "plain": ({}, {}),
    "scale": ({"scale": 0.3}, {"scale": 0.3}),
    "causal": ({"causal": True, "offset": 0}, {"is_causal": True}),  # torch aligns the starts
    "mask": ({"mask": HIDDEN[2:] | (torch.arange(11) % 3 > 0)}, {"attn_mask": HIDDEN[2:] | (torch.arange(11) % 3 > 0)}),
}


@pytest.mark.parametrize("name", TORCHS)
@pytest.mark.parametrize("N_kv", [4, 2])
def test_equals_torchs_scaled_dot_product_attention(name, N_kv):
    args = qkv(2, 4, 5, 11, 6, N_kv, dtype=exact())
    ours, theirs = here(TORCHS[name])
    got = with_gradients(*args, **ours)
    sdpa = F.scaled_dot_product_attention
    torch.testing.assert_close(got, with_gradients(*args, op=sdpa, enable_gqa=True, **theirs))


def test_equals_torchs_with_a_bias():
    q, k, v = qkv(2, 4, 5, 11, 6, dtype=exact())
    bias = torch.randn(1, 4, 5, 11).to(exact())
    wanted = run(lambda q, k, v, bias: F.scaled_dot_product_attention(q, k, v, bias), (q, k, v, bias), {})
    torch.testing.assert_close(with_gradients(q, k, v, bias=bias), [*wanted[0], *wanted[1]])


@pytest.mark.cpu
@pytest.mark.parametrize("case", [case for case in CASES if case.op in ("attention", "linear")], ids=str)
def test_half_on_the_cpu(case):
    """Accepted, and computed in fp32."""
    args, kwargs = case.inputs(dtype=torch.float16)
    check(case.op, args, kwargs)


@pytest.mark.cpu
@pytest.mark.parametrize("n", [1, 2, 3])
def test_two_runs_give_the_same_bits(n, threads):
    """With everything that is summed over batch rows and heads; on several threads."""
    threads(n)
    args, bias, table = qkv(5, 3, 60, 70, 20), torch.randn(1, 3, 60, 70), torch.randn(7, 20)
    options = {"bias": bias, "relative_keys": table, "dropout": 0.2, "seed": 5}
    first = with_gradients(*args, **options)
    for _ in range(5):
        assert_same(with_gradients(*args, **options), first)


# ---------------------------------------------------------------------------------------------------- memory


@pytest.mark.parametrize("options", [{"causal": True}, {"dropout": 0.1, "seed": 3}], ids=str)
def test_long_sequences(options):
    check("attention", qkv(1, 1, 1500, 1500, 16), options)


@pytest.mark.cpu
def test_nothing_of_queries_times_keys_is_in_memory():
    L, D, heads = 1500, 32, 4
    leaves = [t.requires_grad_() for t in qkv(1, heads, L, L, D)]
    options = {"causal": True, "dropout": 0.1, "seed": 3, "alibi": torch.full((heads,), 0.1)}

    def call():
        y = fused.attention(*leaves, **options)
        return torch.autograd.grad(y, leaves, torch.ones_like(y))

    call()
    peak = roofline.peak_memory(call, "cpu")
    assert peak is None or peak < 4 * L * L  # of one of four heads in fp32; the tensors that there must be take 5 MB


@pytest.mark.cpu
def test_views_of_a_projection_are_not_copied():
    B, L, N, D = 64, 64, 8, 64
    q, k, v = torch.randn(B, L, 3, N, D).permute(2, 0, 3, 1, 4)
    fused.attention(q, k, v)
    peak = roofline.peak_memory(lambda: fused.attention(q, k, v), "cpu")
    assert peak is None or peak < 1.4 * 4 * q.numel()  # the result; a copy of q, k or v would be as much again


@pytest.mark.cpu
@torch.no_grad()
def test_a_module_copies_nothing():
    """Between its products and the operator: three parts of the projection, attention's result, and the output."""
    module, x = nn.MultiheadAttention(256, 4), torch.randn(64, 128, 256)
    module(x, x, x)
    peak = roofline.peak_memory(lambda: module(x, x, x), "cpu")
    assert peak is None or peak < 5.6 * 4 * x.numel()


@pytest.mark.cpu
@pytest.mark.parametrize(
    ("L", "type", "wanted"),
    [
        (4, torch.float32, "attention on cpu, float32: csrc/cpu/attention_packed.h, .* 1 threads; all keys .* in one vector"),
        (90, torch.float32, r"attention on cpu, float32: csrc/cpu/attention.h, .* \d+ queries at a time"),
        (90, torch.bfloat16, "attention on cpu, bfloat16: csrc/cpu/attention.h, .*, computed in float32"),
        (90, torch.float16, "attention on cpu, float16: .* widened to float32 before and narrowed after"),
    ],
)  # fmt: skip
def test_explain_says_what_runs(L, type, wanted):
    assert re.match(wanted, fused.explain("attention", *qkv(2, 3, L, L, 5, dtype=type), causal=True))


@pytest.mark.cpu
def test_explain_knows_who_is_not_packed():
    """Relative keys take another kernel, and so do keys too many for a vector: that of few queries, or of many."""
    args = qkv(2, 3, 1, 4, 6)
    assert "attention_packed" in fused.explain("attention", *args)
    assert "attention_packed" in fused.explain("attention", *args, key_rows=torch.zeros(2, 3, dtype=torch.int64))
    assert "attention_thin" in fused.explain(fused.attention, *args, relative_keys=torch.randn(3, 6))
    assert "attention_thin" in fused.explain("attention", *qkv(2, 3, 2, 90, 6))
    assert "attention.h" in fused.explain("attention", *qkv(2, 3, 5, 90, 6))


@pytest.mark.parametrize("options", [{}, {"causal": True, "dropout": 0.2, "seed": 3}], ids=["plain", "causal-dropout"])
def test_results_larger_than_the_caches(options):
    """8 MiB and more: the packed kernel writes past the caches."""
    check("attention", qkv(2050, 8, 4, 5, 32), options)
