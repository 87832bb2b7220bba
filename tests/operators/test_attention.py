"""What `attention` computes, beyond agreeing with its oracle.

Tested are invariances, bit for bit (future and masked keys do not change a result), saturated
softmax, sizes of 0, decoding with a cache and grouped heads, torch's scaled_dot_product_attention,
determinism, and memory that does not grow with queries times keys. The position encodings are in
test_attention_positions.py.
"""

import math
import re

import pytest
import torch
from fusedseq import fused, nn
from fusedseq.testing import CASES, check, run
from torch.nn import functional as F

from bench.suite import roofline
from tests.support.attention_calls import OPERATORS, assert_same, qkv, with_gradients
from tests.support.placement import exact, here

pytestmark = pytest.mark.usefixtures("on_device")
INF, NAN = math.inf, math.nan


# ---- invariances


@OPERATORS
@pytest.mark.parametrize(("L", "S", "D"), [(7, 7, 5), (3, 9, 5), (90, 90, 20)])
def test_future_does_not_matter(L, S, D, op):
    q, k, v = qkv(2, 2, L, S, D)
    expected = op(q, k, v, causal=True)
    for i in (0, L // 2, L - 1):
        last = i + S - L
        k_, v_ = k.clone(), v.clone()
        k_[:, :, last + 1 :], v_[:, :, last + 1 :] = 1e4 * torch.randn(
            2, *k_[:, :, last + 1 :].shape
        )
        assert torch.equal(op(q, k_, v_, causal=True)[:, :, : i + 1], expected[:, :, : i + 1])
        leaves = [t.clone().requires_grad_() for t in (k, v)]
        for g in torch.autograd.grad(op(q, *leaves, causal=True)[:, :, : i + 1].sum(), leaves):
            assert not g[:, :, last + 1 :].any()


# The keys that sequence b of the batch does not see: the last four of 11, all, none.
HIDDEN = torch.arange(11) >= torch.tensor([[7], [0], [11]])
MASKS = {  # arguments that hide these keys
    "mask": {"mask": ~HIDDEN[:, None, None]},
    "lengths": {"key_lengths": torch.tensor([7, 0, 11])},
    "bias": {"bias": torch.zeros(3, 1, 1, 11).masked_fill(HIDDEN[:, None, None], -INF)},
}
OTHER_OPTIONS = {
    "alone": {},
    "all": {"alibi": torch.tensor([0.5, 0.1]), "dropout": 0.3, "seed": 5, "causal": True},
}


@OPERATORS
@pytest.mark.parametrize("other_options", OTHER_OPTIONS)
@pytest.mark.parametrize("mask", MASKS)
def test_masked_keys_do_not_matter(mask, other_options, op):
    """They have no gradient either. A query that sees no key has result 0 and gradient 0."""
    q, k, v = qkv(3, 2, 5, 11, 6)
    options = {**MASKS[mask], **OTHER_OPTIONS[other_options]}
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
def test_keys_beyond_the_lengths_are_not_read(L, dtype, value):
    """They may be NaN or infinite, as in memory that was not written. With a mask they may not."""
    q, k, v = qkv(3, 2, L, 11, 6, dtype=dtype)
    lengths = torch.tensor([7, 0, 11])
    expected = with_gradients(q, k, v, key_lengths=lengths)
    k_, v_ = (t.masked_fill(here(HIDDEN)[:, None, :, None], value) for t in (k, v))
    assert_same(with_gradients(q, k_, v_, key_lengths=lengths), expected)


@OPERATORS
@pytest.mark.parametrize("S", [3, 7, 11, 20])
def test_nan_in_a_query_is_propagated(S, op):
    """A kernel must not mistake a NaN logit for a query that sees no key, whose result is 0."""
    q, k, v = qkv(2, 2, 5, S, 3)
    q[1, 0, 2] = NAN
    y, *grads = with_gradients(q, k, v, op=op)
    assert y[1, 0, 2].isnan().all()
    assert y.isnan().sum() == 3
    assert grads[0][1, 0, 2].isnan().all()


BLIND = {  # options under which the second of three queries, or every query, sees no key
    "mask": {"mask": torch.tensor([True, False, True])[:, None].expand(3, 4)},
    "bias": {"bias": torch.tensor([0.0, -INF, 0.0])[:, None].expand(3, 4).clone()},
    "all by lengths": {"key_lengths": torch.zeros(2, dtype=torch.int64)},
    "all by causality": {"causal": True, "offset": -3},
    "all by a scalar": {"mask": torch.tensor(False)},
}


@OPERATORS
@pytest.mark.parametrize("dropout", [0.0, 0.4])
@pytest.mark.parametrize("mask", BLIND)
def test_a_query_without_a_key_is_exactly_zero(mask, dropout, op):
    y, dq, dk, dv, *dbias = with_gradients(
        *qkv(2, 2, 3, 4, 5), op=op, **BLIND[mask], dropout=dropout, seed=2
    )
    if mask.startswith("all"):
        assert not any(t.any() for t in (y, dq, dk, dv))
        return
    for t in (y, dq):
        assert not t[:, :, 1].any()
        assert t[:, :, [0, 2]].any()
    assert all(t.isfinite().all() for t in (dk, dv, *dbias))
    assert not any(t[1].any() for t in dbias)


@pytest.mark.parametrize(
    "options", [{}, {"causal": True}, {"alibi": torch.tensor([0.3, 0.2])}], ids=str
)
def test_a_padded_batch_equals_its_sequences_alone(options):
    """Queries and keys are padded to the same length."""
    q, k, v = qkv(3, 2, 40, 40, 6, dtype=exact())
    lengths = torch.tensor([40, 17, 1])
    options = here(options)
    y = fused.attention(q, k, v, key_lengths=lengths, **options)
    for b, n in enumerate(lengths):
        alone = fused.attention(*(t[b : b + 1, :, :n] for t in (q, k, v)), **options)
        torch.testing.assert_close(y[b : b + 1, :, :n], alone)


@OPERATORS
def test_a_bias_constant_over_the_keys_has_no_gradient(op):
    """softmax(x + c) = softmax(x): only rounding errors remain."""
    args, bias = qkv(2, 3, 6, 70, 8), torch.randn(2, 3, 6, 1)
    y, *_, dbias = with_gradients(*args, op=op, bias=bias)
    torch.testing.assert_close(y, op(*args))
    assert dbias.abs().max() <= 70 * torch.finfo(torch.float32).eps


# ---- saturated softmax

SATURATED = {  # L, S, D; of the packed and block kernels
    "packed": (2, 2, 8),
    "packed of a whole vector": (6, 7, 12),
    "blocks": (20, 33, 8),
    "few queries and blocks": (1, 40, 16),
}


@pytest.mark.parametrize("options", [{}, {"causal": True}, {"dropout": 0.3, "seed": 1}], ids=str)
@pytest.mark.parametrize("size", SATURATED)
def test_gradients_of_a_saturated_softmax(size, options, dtype):
    """Logits of some hundreds, of which a row's largest has nearly all the probability.

    The numbers are multiples of 1/4, so that the logits are exact in any order of summation, and
    all that is rounded is the softmax and its gradient.
    """
    L, S, D = SATURATED[size]
    q, k, v = (t.mul(4).round() / 4 for t in qkv(2, 8, L, S, D, dtype=dtype))
    # The oracle's error, from which the budget follows, is small by luck in some small tensors.
    check("attention", (16 * q, k, v), {"scale": 1.0, **options}, together=True)


ONE_KEY = {  # options under which every query sees the first key alone
    "lengths": lambda S: {"key_lengths": torch.tensor([1, 1])},
    "mask": lambda S: {"mask": torch.arange(S) == 0},
    "bias": lambda S: {"bias": torch.zeros(1, S).masked_fill(torch.arange(S) > 0, -INF)},
}


@pytest.mark.parametrize("dropout", [0.0, 0.4])
@pytest.mark.parametrize("option", ONE_KEY)
@pytest.mark.parametrize(("L", "S", "D"), [(1, 1, 8), (5, 6, 20), (1, 40, 30), (20, 40, 12)])
def test_one_visible_key_has_no_gradient_of_queries_and_keys(L, S, D, option, dropout, dtype):
    """The probability is 1 whatever the logit is, also where that is large and has an error."""
    q, k, v = qkv(2, 3, L, S, D, dtype=dtype)
    options = here(ONE_KEY[option](S), dtype)
    y, dq, dk, dv, *dbias = with_gradients(30 * q, k, v, **options, dropout=dropout, seed=3)
    assert not any(t.any() for t in (dq, dk, *dbias))
    assert dv[:, :, 0].any()
    if not dropout:  # a kernel of a GPU divides by a probability that is not exactly 1
        rtol = 2**-21 if y.is_cuda and dtype == torch.float32 else 0
        torch.testing.assert_close(y, v[:, :, :1].expand_as(y), rtol=rtol, atol=0)


@pytest.mark.parametrize(("L", "D"), [(6, 8), (40, 8), (40, 60)])
def test_the_first_query_of_causal_attention_has_no_gradient(L, D, dtype):
    q, k, v = qkv(2, 3, L, L, D, dtype=dtype)
    factor = 3 if dtype == torch.float16 else 30  # which has no number as small as these gradients
    _, dq, *_ = with_gradients(factor * q, k, v, causal=True)
    assert not dq[:, :, 0].any()
    assert dq[:, :, 1].any()


# ---- sizes of 0

SDPA_OPTIONS = {  # options of fused.attention, options of scaled_dot_product_attention
    "plain": ({}, {}),
    "scale": ({"scale": 0.3}, {"scale": 0.3}),
    # torch's causal mask aligns the first query with the first key.
    "causal": ({"causal": True, "offset": 0}, {"is_causal": True}),
    "mask": (
        {"mask": HIDDEN[2:] | (torch.arange(11) % 3 > 0)},
        {"attn_mask": HIDDEN[2:] | (torch.arange(11) % 3 > 0)},
    ),
}

EMPTY = {"B": (0, 2, 3, 4, 5), "N": (2, 0, 3, 4, 5), "L": (2, 2, 0, 4, 5), "S": (2, 2, 3, 0, 5)} | {
    "D": (2, 2, 3, 4, 0),
    "L and S": (2, 2, 0, 0, 5),
}


@pytest.fixture
def poisoned_memory():
    """New tensors hold NaN until they are written."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


@OPERATORS
@pytest.mark.parametrize("name", SDPA_OPTIONS)
@pytest.mark.parametrize("size", EMPTY)
def test_sizes_of_0_as_in_scaled_dot_product_attention(size, name, op, dtype, poisoned_memory):
    if size == "N" and torch.__version__ < "2.13":
        pytest.skip("scaled_dot_product_attention divides by the number of heads in this torch")
    B, N, L, S, D = EMPTY[size]
    ours, theirs = SDPA_OPTIONS[name]
    if name == "mask":
        ours, theirs = {"mask": torch.ones(L, S) > 0}, {"attn_mask": torch.ones(L, S) > 0}
    args = qkv(B, N, L, S, D, dtype=dtype)
    got = with_gradients(*args, op=op, **ours)
    # Torch's own kernels of a GPU return None for heads of width 0, and crash without heads.
    on_cpu = [t.cpu() for t in args]
    theirs = {k: t.cpu() if isinstance(t, torch.Tensor) else t for k, t in theirs.items()}
    with torch.device("cpu"):
        results, grads = run(F.scaled_dot_product_attention, on_cpu, theirs)
    expected = [t.to(got[0].device) for t in (*results, *grads)]
    for a, b in zip(got, expected, strict=True):
        assert a.shape == b.shape
        assert a.dtype == b.dtype
    assert_same(got, expected)


@OPERATORS
@pytest.mark.parametrize("size", EMPTY)
def test_options_of_sizes_of_0(size, op, poisoned_memory):
    """Gradients of a bias and of relative keys are zeros in their shapes."""
    B, N, L, S, D = EMPTY[size]
    bias, table = torch.randn(1, N, L, S), torch.randn(7, D)
    options = {"causal": True, "alibi": torch.ones(N), "dropout": 0.3, "seed": 1}
    lengths = torch.full((B,), S)
    y, *grads = with_gradients(
        *qkv(B, N, L, S, D), op=op, bias=bias, relative_keys=table, key_lengths=lengths, **options
    )
    assert y.shape == (B, N, L, D)
    assert [g.shape for g in grads[3:]] == [bias.shape, table.shape]
    assert not any(t.any() for t in (y, *grads))


@pytest.mark.parametrize("N_kv", [0, 1])
def test_grouped_queries_without_heads(N_kv):
    y, dq, dk, dv = with_gradients(*qkv(2, 0, 3, 4, 5, N_kv or None))
    assert y.shape == dq.shape == (2, 0, 3, 5)
    q, k, v = torch.randn(2, 0, 3, 5), torch.randn(2, N_kv, 4, 5), torch.randn(2, N_kv, 4, 5)
    y, dq, dk, dv = with_gradients(q, k, v)
    assert dk.shape == dv.shape == k.shape
    assert not dk.any()
    assert not dv.any()


def test_gradients_of_a_projection_without_queries():
    """k and v are views of one projection, whose gradient is laid out as one tensor."""
    k, v = torch.randn(2, 4, 2, 3, 5).permute(2, 0, 3, 1, 4)
    y, dq, dk, dv = with_gradients(torch.randn(2, 3, 0, 5), k, v)
    assert y.shape == dq.shape == (2, 3, 0, 5)
    assert dk.shape == dv.shape == (2, 3, 4, 5)
    assert not any(t.any() for t in (dk, dv))


# ---- dropout


def test_dropout_applies_dropout_mask():
    """With the identity matrix as v, the result is the attention probabilities."""
    q, k, _ = qkv(2, 3, 7, 21, 21)
    eye = torch.eye(21).expand(2, 3, 21, 21)
    for p, seed in ((0.3, 5), (0.9, -1), (0.5, torch.tensor(2**40))):
        plain, dropped = (
            fused.attention(q, k, eye),
            fused.attention(q, k, eye, dropout=p, seed=seed),
        )
        keep = fused.dropout_mask(seed, p, (2, 3, 7, 21)).to(dropped.device)
        assert torch.equal(dropped != 0, keep)
        torch.testing.assert_close(dropped, torch.where(keep, plain / (1 - p), 0))


# ---- decoding, grouped heads

POSITIONS = {
    "none": {},
    "alibi": {"alibi": torch.tensor([0.5, 0.1, 0.2])},
    "keys": {"relative_keys": torch.randn(5, 4).double()},
    "rope": {"rope": torch.randn(12, 4).double()},  # the property holds for any table
    "bias": {"bias": torch.randn(3, 9, 9).double()},
}


def options_of_query(options, i, S):
    """The options for a call with query i alone and the first S keys."""
    return {**options, **({"bias": options["bias"][:, i : i + 1, :S]} if "bias" in options else {})}


@OPERATORS
@pytest.mark.parametrize("name", POSITIONS)
def test_cached_decoding_equals_full(name, op):
    q, k, v = qkv(2, 3, 9, 9, 4, dtype=exact())
    options = here(POSITIONS[name], exact())
    expected = op(q, k, v, causal=True, **options)
    for i in range(9):
        step = q[:, :, i : i + 1], k[:, :, : i + 1], v[:, :, : i + 1]
        one = op(*step, causal=True, **options_of_query(options, i, i + 1))
        torch.testing.assert_close(one, expected[:, :, i : i + 1])


@OPERATORS
@pytest.mark.parametrize("name", POSITIONS)
@pytest.mark.parametrize("N_kv", [3, 1])
def test_key_rows_equal_copied_caches(name, N_kv, op):
    """key_rows: which row of the caches holds each position of a hypothesis of a beam search.

    The caches have four rows for two hypotheses, and memory for more positions than are used.
    """
    _, k, v = qkv(4, 3, 1, 12, 4, N_kv, dtype=exact())
    q, rows = torch.randn(2, 3, 1, 4).to(exact()), torch.randint(4, (2, 9))
    options = options_of_query(here(POSITIONS[name], exact()), 8, 9)
    copies = [
        torch.stack([torch.stack([t[r, :, j] for j, r in enumerate(row)], 1) for row in rows])
        for t in (k, v)
    ]
    lengths = torch.tensor([9, 4])
    got = op(q, k, v, key_rows=rows, key_lengths=lengths, causal=True, **options)
    torch.testing.assert_close(got, op(q, *copies, key_lengths=lengths, causal=True, **options))


@pytest.mark.parametrize("N_kv", [1, 2])
def test_grouped_queries_equal_repeated_heads(N_kv):
    q, k, v = qkv(2, 4, 5, 7, 6, N_kv, dtype=exact())
    options = {
        "causal": True,
        "dropout": 0.2,
        "seed": 3,
        "alibi": torch.tensor([0.1, 0.2, 0.3, 0.4]),
    }
    y, dq, dk, dv = with_gradients(q, k, v, **options)
    expected = with_gradients(q, *(t.repeat_interleave(4 // N_kv, 1) for t in (k, v)), **options)
    grouped = [t.unflatten(1, (N_kv, -1)).sum(2) for t in expected[2:]]
    torch.testing.assert_close([y, dq, dk, dv], [*expected[:2], *grouped])


# ---- torch.nn.functional, float16, determinism


@pytest.mark.parametrize("name", SDPA_OPTIONS)
@pytest.mark.parametrize("N_kv", [4, 2])
def test_equals_scaled_dot_product_attention(name, N_kv):
    args = qkv(2, 4, 5, 11, 6, N_kv, dtype=exact())
    ours, theirs = here(SDPA_OPTIONS[name])
    got = with_gradients(*args, **ours)
    sdpa = F.scaled_dot_product_attention
    torch.testing.assert_close(got, with_gradients(*args, op=sdpa, enable_gqa=True, **theirs))


def test_equals_scaled_dot_product_attention_with_a_bias():
    q, k, v = qkv(2, 4, 5, 11, 6, dtype=exact())
    bias = torch.randn(1, 4, 5, 11).to(exact())
    results, grads = run(F.scaled_dot_product_attention, (q, k, v, bias), {})
    torch.testing.assert_close(with_gradients(q, k, v, bias=bias), [*results, *grads])


@pytest.mark.cpu
@pytest.mark.parametrize(
    "case", [case for case in CASES if case.op in ("attention", "linear")], ids=str
)
def test_float16_on_the_cpu(case):
    """The CPU computes float16 inputs in fp32."""
    args, kwargs = case.inputs(dtype=torch.float16)
    check(case.op, args, kwargs)


@pytest.mark.cpu
@pytest.mark.parametrize("n", [1, 2, 3])
def test_two_runs_give_the_same_bits(n, threads):
    """Also of the gradients that are sums over batch and heads, on several threads."""
    threads(n)
    args, bias, table = qkv(5, 3, 60, 70, 20), torch.randn(1, 3, 60, 70), torch.randn(7, 20)
    options = {"bias": bias, "relative_keys": table, "dropout": 0.2, "seed": 5}
    first = with_gradients(*args, **options)
    for _ in range(5):
        assert_same(with_gradients(*args, **options), first)


# ---- memory


@pytest.mark.parametrize("options", [{"causal": True}, {"dropout": 0.1, "seed": 3}], ids=str)
def test_long_sequences(options):
    check("attention", qkv(1, 1, 1500, 1500, 16), options)


@pytest.mark.cpu
def test_memory_does_not_hold_queries_times_keys():
    L, D, heads = 2500, 32, 4
    leaves = [t.requires_grad_() for t in qkv(1, heads, L, L, D)]
    options = {"causal": True, "dropout": 0.1, "seed": 3, "alibi": torch.full((heads,), 0.1)}

    def call():
        y = fused.attention(*leaves, **options)
        return torch.autograd.grad(y, leaves, torch.ones_like(y))

    call()
    peak = roofline.peak_memory(call, "cpu")
    # The limit is the fp32 logits of one of the four heads. The results and gradients take 9 MB,
    # and copies of dk and dv that are added up another 5 MB.
    assert peak is None or peak < 4 * L * L


@pytest.mark.cpu
def test_views_of_a_projection_are_not_copied():
    B, L, N, D = 64, 64, 8, 64
    q, k, v = torch.randn(B, L, 3, N, D).permute(2, 0, 3, 1, 4)
    fused.attention(q, k, v)
    peak = roofline.peak_memory(lambda: fused.attention(q, k, v), "cpu")
    # The result takes 4 * q.numel() bytes; a copy of q, k or v would take as much again.
    assert peak is None or peak < 1.4 * 4 * q.numel()


@pytest.mark.cpu
@torch.no_grad()
def test_a_module_does_not_copy_its_heads():
    """Peak memory is the three parts of the projection, the result of attention, and the output."""
    module, x = nn.MultiheadAttention(256, 4), torch.randn(64, 128, 256)
    module(x, x, x)
    peak = roofline.peak_memory(lambda: module(x, x, x), "cpu")
    assert peak is None or peak < 5.6 * 4 * x.numel()


EXPLANATIONS = [  # L, dtype, what explain says after "attention on cpu, "
    (
        4,
        torch.float32,
        r"float32: csrc/cpu/attention/packed\.h, .* 1 thread; all keys .* in one vector",
    ),
    (90, torch.float32, r"float32: csrc/cpu/attention/blocks\.h, .* \d+ queries at a time"),
    (90, torch.bfloat16, r"bfloat16: csrc/cpu/attention/blocks\.h, .* in float32"),
    (90, torch.float16, r"float16: .* its tensors converted to float32 and back"),
]


@pytest.mark.cpu
@pytest.mark.parametrize(("L", "own", "pattern"), EXPLANATIONS)
def test_explain_says_what_runs(L, own, pattern):
    explanation = fused.explain("attention", *qkv(2, 3, L, L, 5, dtype=own), causal=True)
    assert re.match(f"attention on cpu, {pattern}", explanation)


@pytest.mark.cpu
def test_explain_of_nested_tensors_is_that_of_packed_sequences():
    x = torch.nested.nested_tensor([torch.randn(3, 8), torch.randn(2, 8)], layout=torch.jagged)
    q = x.unflatten(-1, [2, 4]).transpose(1, 2)
    rows = q.transpose(1, 2).values()
    found = fused.explain("attention", q, q, q, causal=True)
    packed = fused.explain("attention_varlen", *[rows] * 3, *[x.offsets()] * 2, causal=True)
    assert found.partition(": ")[2] == packed.partition(": ")[2]


@pytest.mark.cpu
@pytest.mark.parametrize("op", ["lstm", "dropout", "linear_cross_entropy"])
def test_explain_of_fp16_names_the_error_of_the_call(op):
    found = fused.explain(op, torch.ones(2, 3, 4).half())
    assert found.startswith(f"{op} on cpu, float16: no kernel, the call raises TypeError")


@pytest.mark.cpu
def test_explain_names_the_kernel_of_short_sequences():
    """Relative keys, or more keys than a vector holds, need the kernel of few or many queries."""
    args = qkv(2, 3, 1, 4, 6)
    assert "attention/packed.h" in fused.explain("attention", *args)
    assert "attention/packed.h" in fused.explain(
        "attention", *args, key_rows=torch.zeros(2, 3, dtype=torch.int64)
    )
    with_keys = fused.explain(fused.attention, *args, relative_keys=torch.randn(3, 6))
    assert "attention/few_queries.h" in with_keys
    assert "attention/few_queries.h" in fused.explain("attention", *qkv(2, 3, 2, 90, 6))
    assert "attention/blocks.h" in fused.explain("attention", *qkv(2, 3, 5, 90, 6))


@pytest.mark.parametrize(
    "options", [{}, {"causal": True, "dropout": 0.2, "seed": 3}], ids=["plain", "causal-dropout"]
)
def test_results_larger_than_the_caches(options):
    """From 8 MiB on, the packed kernel uses non-temporal stores."""
    check("attention", qkv(2050, 8, 4, 5, 32), options)
