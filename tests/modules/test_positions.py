"""The modules of relative and absolute positions against the formulas of their papers."""

import copy
import math

import pytest
import torch
from fusedseq import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from tests.support.attention_modules import N

pytestmark = pytest.mark.usefixtures("in_exact_dtype")


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


@pytest.mark.cpu
@pytest.mark.parametrize(("R", "base"), [(8, 10_000.0), (8, 500.0), (6, 500.0)])
def test_rotary_angles(R, base):
    """Su et al., 2021: pair m of R elements is rotated by p base^(-2m / R)."""
    found = nn.Rotary(8, base=base, rotary_dim=R)(5, 7, 2)
    angles = torch.arange(7.0)[:, None] * base ** (-torch.arange(0.0, R, 2) / R)
    expected = torch.stack([angles.cos(), angles.sin()], -1).flatten(1)
    torch.testing.assert_close(found[:7], expected.float())


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


def attention_with_a_table_of_four():
    return nn.MultiheadAttention(8, 2, positions=nn.Rotary(4, max_positions=4))


def test_a_table_that_grew_in_inference_mode_serves_a_training():
    module = attention_with_a_table_of_four()
    with torch.inference_mode():
        longer = torch.randn(6, 2, 8)
        module(longer, longer, longer)
        converted = nn.Rotary(4, max_positions=4).double()
    x = torch.randn(4, 2, 8)
    module(x, x, x)[0].sum().backward()
    assert not any(t.is_inference() for m in (module, converted) for t in m.buffers())


def test_a_table_without_data_is_not_kept():
    module, x = attention_with_a_table_of_four(), torch.randn(6, 2, 8)
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        fake = mode.from_tensor(x)
        assert module(fake, fake, fake)[0].shape == x.shape
    assert type(module(x, x, x)[0]) is torch.Tensor


@pytest.mark.cpu
def test_rotary_with_more_queries_than_keys_needs_another_alignment():
    module, x, keys = attention_with_a_table_of_four(), torch.randn(9, 2, 8), torch.randn(5, 2, 8)
    message = "^Rotary: there must be at least as many keys as queries, .* got 9 queries and 5 keys"
    with pytest.raises(ValueError, match=message):
        module(x, keys, keys)
    assert module(x, keys, keys, causal_alignment="start")[0].shape == x.shape


@pytest.mark.parametrize("offset", [-3, 0, 5])
def test_the_bias_of_each_pair_is_that_of_its_distance(offset):
    """Also of no queries or no keys."""
    bias = nn.RelativeBias(2, 8, 16)
    for L in range(5):
        for S in range(5):
            distances = torch.arange(S) - torch.arange(L)[:, None] - offset
            expected = bias.weight[bias.buckets(distances)].permute(2, 0, 1)[None]
            assert torch.equal(bias(L, S, offset), expected)


def test_attention_with_a_relative_bias_takes_no_queries():
    module = nn.MultiheadAttention(8, 2, positions=nn.RelativeBias(2))
    keys = torch.randn(3, 2, 8)
    assert module(keys[:0], keys, keys)[0].shape == (0, 2, 8)
