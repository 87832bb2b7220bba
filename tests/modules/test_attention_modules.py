"""MultiheadAttention and the modules of positions against torch's modules and the papers' formulas.

The tests run in fp64 (on a GPU in fp32), so that rounding does not matter. The rounding errors of
each dtype are tested for the operators, in test_operators.py.
"""

import copy
import math
import sys

import pytest
import torch
from fusedseq import fused, nn
from fusedseq.nn.heads import heads
from torch import nn as torch_nn

from tests.support.placement import exact

E, N, D, B = 12, 3, 4, 2
# (L, S). "self" has one tensor for query, key and value; "cross" one for key and value; "three" has
# three tensors.
INPUTS = {"self": (5, 5), "cross": (4, 6), "three": (4, 6)}
POSITIONS = {
    "none": lambda: None,
    "alibi": lambda: nn.ALiBi(N),
    "bias": lambda: nn.RelativeBias(N, 8, 16),
    "keys": lambda: nn.RelativeKeys(2, D),
    "rotary": lambda: nn.Rotary(D, max_positions=3),
}


@pytest.fixture(autouse=True)
def _exact(on_device):
    torch.set_default_dtype(exact())
    yield
    torch.set_default_dtype(torch.float32)


@pytest.fixture(params=POSITIONS)
def positions(request):
    return POSITIONS[request.param]()


def inputs(kind, batch_first=False, kdim=E, vdim=E):
    L, S = INPUTS[kind]
    query, key, value = torch.randn(L, B, E), torch.randn(S, B, kdim), torch.randn(S, B, vdim)
    given = {
        "self": (query, query, query),
        "cross": (query, key, key),
        "three": (query, key, value),
    }[kind]
    return tuple(t.transpose(0, 1) for t in given) if batch_first else given


def pair(ops, *args, **options):
    """Returns torch's module, and ours with the same parameters."""
    theirs = torch_nn.MultiheadAttention(*args, **options)
    for p in theirs.parameters():
        torch_nn.init.normal_(p, std=0.3)
    ours = nn.MultiheadAttention(*args, ops=ops, **options)
    ours.load_state_dict(theirs.state_dict())
    return theirs, ours


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


# Positions


@pytest.mark.cpu
@pytest.mark.parametrize("heads", range(1, 20))
def test_alibi_slopes(heads):
    """Press et al., 2022: 'starts at 2^(-8/n) and uses that same value as its ratio'.

    For other numbers of heads, the slopes of twice the next lower power of two are used too.
    """
    power = 1
    while 2 * power <= heads:
        power *= 2
    first, ratio = 2.0 ** (-8 / power), 2.0 ** (-8 / power)
    expected = [first * ratio**n for n in range(power)]
    first = ratio = 2.0 ** (-8 / (2 * power))
    expected += [first * ratio**n for n in range(2 * power)][0::2][: heads - power]
    torch.testing.assert_close(nn.ALiBi(heads)(3, 4, 1), torch.tensor(expected).float())


def t5_bucket(distance, bidirectional, num_buckets, max_distance):
    """Raffel et al., 2020, section 2.1, for one distance, as the paper describes it."""
    bucket, behind = 0, -distance
    if bidirectional:
        num_buckets //= 2
        bucket = num_buckets if distance > 0 else 0
        behind = abs(distance)
    behind = max(behind, 0)
    exact = num_buckets // 2
    if behind < exact:
        return bucket + behind
    # 0 at the first wide bucket, 1 after the last
    share = math.log(behind / exact) / math.log(max_distance / exact)
    # The small term rounds up a share that should be an integer and is slightly below it.
    return bucket + min(exact + int(share * (num_buckets - exact) + 1e-6), num_buckets - 1)


@pytest.mark.cpu
@pytest.mark.parametrize("bidirectional", [True, False])
@pytest.mark.parametrize(("buckets", "most"), [(32, 128), (8, 20), (6, 9), (4, 3)])
def test_t5_buckets(bidirectional, buckets, most):
    module = nn.RelativeBias(N, buckets, most, bidirectional=bidirectional)
    L, S, offset = 40, 200, 90
    bias = module(L, S, offset)
    assert bias.shape == (1, N, L, S)
    for i in (0, 1, 17, 39):
        expected = [t5_bucket(j - (i + offset), bidirectional, buckets, most) for j in range(S)]
        assert torch.equal(bias[0, :, i], module.weight[expected].T), i
    # The bucket of distance 0 among the keys after the query is never used.
    unused = {buckets // 2} if bidirectional else set()
    used = {t5_bucket(d, bidirectional, buckets, most) for d in range(-most, most + 1)}
    assert used == {*range(buckets)} - unused


@pytest.mark.cpu
def test_t5_gradient_is_the_sum_over_each_bucket(threads):
    """It is the same bit for bit in every run, with any number of threads."""
    module = nn.RelativeBias(N, dtype=torch.float32)
    found = []
    for n in (1, 2, 2, 2):
        threads(n)
        grad_output = torch.randn(
            1, N, 90, 100, generator=torch.Generator().manual_seed(1), dtype=torch.float32
        )
        found.append(torch.autograd.grad(module(90, 100, 10), module.weight, grad_output)[0])
    bucket = module.buckets(torch.arange(100) - torch.arange(90)[:, None] - 10)
    expected = torch.zeros(32, N)
    expected.index_add_(0, bucket.flatten(), grad_output.double().flatten(2)[0].T)
    torch.testing.assert_close(found[0], expected.float())
    assert all(torch.equal(found[0], g) for g in found)


@pytest.mark.cpu
def test_tables_stay_fp32_and_out_of_the_state_dict():
    for build in (
        lambda: nn.ALiBi(3),
        lambda: nn.Rotary(8, max_positions=50),
        lambda: nn.SinusoidalPositions(8),
    ):
        module, half = build(), build().bfloat16()
        assert not module.state_dict()
        (table,), (narrow,) = module.buffers(), half.buffers()
        assert narrow.dtype == torch.float32
        assert torch.equal(table, narrow)
        assert [t.device.type for t in copy.deepcopy(module).to("meta").buffers()] == ["meta"]


@pytest.mark.cpu
def test_rotary_table_grows_without_changing_its_rows():
    module = nn.Rotary(8, max_positions=4)
    first = module(3, 4, 1).clone()
    grown = module(2, 9, 7)
    assert len(grown) >= 9
    assert torch.equal(grown[:4], first)
    p, m = 8, 3
    torch.testing.assert_close(
        grown[p, 2 * m : 2 * m + 2].tolist(),
        [math.cos(p * 10000 ** (-2 * m / 8)), math.sin(p * 10000 ** (-2 * m / 8))],
    )


@pytest.mark.parametrize("width", [1, 6, 7])
def test_sinusoidal_positions(width, ops):
    """Vaswani et al., 2017, section 3.5."""
    module = nn.SinusoidalPositions(width, max_positions=2, ops=ops)
    y = module(torch.zeros(9, 2, width), offset=3)
    for p in range(3, 12):
        row = [
            (math.cos if c % 2 else math.sin)(p / 10000 ** (2 * (c // 2) / width))
            for c in range(width)
        ]
        torch.testing.assert_close(y[p - 3], torch.tensor([row, row]))


ADDED = {
    "sinusoidal": lambda **options: nn.SinusoidalPositions(6, **options),
    "learned": lambda **options: nn.LearnedPositions(9, 6, **options),
}


@pytest.mark.parametrize("name", ADDED)
def test_added_positions_with_an_offset_equal_the_whole_sequence(name, ops):
    module = ADDED[name](ops=ops, batch_first=True).eval()
    x = torch.randn(2, 9, 6)
    steps = [module(x[:, p : p + 1], offset=p) for p in range(9)]
    assert torch.equal(torch.cat(steps, 1), module(x))
    module.batch_first = False
    assert torch.equal(module(x.transpose(0, 1)).transpose(0, 1), torch.cat(steps, 1))


@pytest.mark.parametrize("name", ADDED)
def test_added_positions_are_dropped_with_the_embeddings(name, ops):
    y = ADDED[name](dropout=1.0, ops=ops)(torch.randn(4, 2, 6))
    assert not y.any()


def test_learned_positions_are_limited():
    with pytest.raises(
        ValueError, match=r"^LearnedPositions: positions must be at most max_positions = 9, got 10"
    ):
        ADDED["learned"]()(torch.zeros(4, 2, 6), offset=6)


# Cached decoding


@pytest.mark.parametrize("batch_first", [False, True], ids=["LBE", "BLE"])
def test_cached_decoding_equals_the_whole_sequence(ops, positions, batch_first):
    """A prefix in one call, then further positions."""
    module = nn.MultiheadAttention(
        E, N, positions=positions, batch_first=batch_first, ops=ops
    ).eval()
    x = torch.randn((B, 9, E) if batch_first else (9, B, E))
    with torch.no_grad():
        expected, _ = module(x, x, x, is_causal=True)
        cache, time, got = module.cache(B, 9), int(batch_first), []
        for part in x.split([4, 1, 1, 2, 1], dim=time):
            got.append(module(part, part, part, is_causal=True, cache=cache)[0])
    torch.testing.assert_close(torch.cat(got, time), expected)


def test_cross_attention_reads_its_keys_from_the_cache(ops):
    module = nn.MultiheadAttention(E, N, ops=ops).eval()
    query, memory, _ = inputs("cross")
    lengths = torch.tensor([6, 4])
    with torch.no_grad():
        expected, _ = module(query, memory, memory, key_lengths=lengths)
        cache = module.cache(B, 6)
        got = [module(query[:1], memory, memory, key_lengths=lengths, cache=cache)[0]]
        got += [module(q[None], cache=cache, key_lengths=lengths)[0] for q in query[1:]]
    torch.testing.assert_close(torch.cat(got), expected)


def test_reordering_a_beam_copies_no_keys(ops, positions):
    """Hypotheses are dropped, duplicated and exchanged at each step."""
    module = nn.MultiheadAttention(E, N, positions=positions, batch_first=True, ops=ops).eval()
    rows = 4
    history, cache = torch.empty(rows, 0, E), module.cache(rows, 6)
    with torch.no_grad():
        for step in range(6):
            x = torch.randn(rows, 1, E)
            history = torch.cat([history, x], 1)
            expected = module(history, history, history, is_causal=True)[0][:, -1:]
            torch.testing.assert_close(module(x, x, x, is_causal=True, cache=cache)[0], expected)
            address = cache.k.data_ptr()
            parents = torch.randint(rows, (rows,), generator=torch.Generator().manual_seed(step))
            history = history[parents]
            cache.reorder(parents)
            assert cache.k.data_ptr() == address


@torch.no_grad()
def test_the_number_of_hypotheses_may_change(ops):
    """Up to the reserved rows; each step equals attention over each hypothesis's own history."""
    module = nn.MultiheadAttention(E, N, batch_first=True, ops=ops).eval()
    history, cache = torch.empty(4, 0, E), module.cache(4, 6)
    for step, parents in enumerate(([0, 2], [1, 0, 0], [2], [0, 0, 0, 0], [3, 1])):
        cache.reorder(torch.tensor(parents))
        x = torch.randn(len(parents), 1, E)
        history = torch.cat([history[parents], x], 1)
        expected = module(history, history, history, is_causal=True)[0][:, -1:]
        torch.testing.assert_close(module(x, x, x, is_causal=True, cache=cache)[0], expected)
        assert cache.length == step + 1


def test_a_beam_shares_the_keys_of_its_sentence(ops):
    module = nn.MultiheadAttention(E, N, batch_first=True, ops=ops).eval()
    memory, query, sentence = (
        torch.randn(2, 6, E),
        torch.randn(5, 1, E),
        torch.tensor([0, 0, 0, 1, 1]),
    )
    with torch.no_grad():
        cache = module.cache(2, 6)
        module(query[:2], memory, memory, cache=cache)
        cache.reorder(sentence)
        torch.testing.assert_close(
            module(query, cache=cache)[0], module(query, memory[sentence], memory[sentence])[0]
        )


def test_a_cache_rejects_gradients(ops):
    module, x = nn.MultiheadAttention(E, N, ops=ops), torch.randn(1, B, E)
    with pytest.raises(
        RuntimeError, match="KeyValueCache: keys and values must not require a gradient"
    ):
        module(x, x, x, cache=module.cache(B, 3))


def test_fp16_equals_torchs_module():
    """Forward and backward, also on the CPU, within fp16's rounding error."""
    theirs, ours = (module.half() for module in pair(fused, E, N))
    x = torch.randn(5, B, E).half()
    for module in (theirs, ours):
        module(x, x, x, need_weights=False)[0].sum().backward()
    y, expected = (module(x, x, x, need_weights=False)[0] for module in (ours, theirs))
    torch.testing.assert_close(
        y, expected, atol=16 * torch.finfo(x.dtype).eps * expected.abs().max().item(), rtol=0
    )
    assert all(p.grad.dtype == torch.float16 for p in ours.parameters())


@pytest.mark.cpu
@torch.no_grad()
def test_a_full_cache_and_other_rows_are_rejected():
    module, x = nn.MultiheadAttention(E, N), torch.randn(2, B, E)
    cache = module.cache(B, 3)
    module(x, x, x, cache=cache)
    with pytest.raises(
        ValueError, match="KeyValueCache: positions must be at most max_length = 3, got 4"
    ):
        module(x, x, x, cache=cache)
    with pytest.raises(
        ValueError, match="KeyValueCache: keys must be for 2 rows, as many as reserved, got 1"
    ):
        module(x[:, :1], x[:, :1], x[:, :1], cache=cache)
    cache.reorder(torch.tensor([0]))
    with pytest.raises(
        ValueError,
        match="KeyValueCache: keys must be for 2 rows, as many as reserved, got 2 for 1 hypo",
    ):
        module(x, x, x, cache=cache)


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
    "MultiheadAttention: embed_dim must be a multiple of num_heads, got 12 and 5": lambda: (
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
