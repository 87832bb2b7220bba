"""The position encodings of `attention` against the formulas of their papers and of published
models, in scalar arithmetic.
"""

import math

import pytest
import torch
from fusedseq import nn, reference
from torch.nn import functional as F

from tests.support.attention_calls import OPERATORS, qkv, with_gradients
from tests.support.placement import exact

pytestmark = pytest.mark.usefixtures("on_device")


def scalar_attention(logit, L, v):
    """Attention of L queries in scalar arithmetic; logit(b, n, i, j) is a function."""
    B, N, S, D = v.shape
    y = torch.zeros(B, N, L, D, dtype=exact())
    for b in range(B):
        for n in range(N):
            for i in range(L):
                e = [math.exp(logit(b, n, i, j)) for j in range(S)]
                y[b, n, i] = sum(e_j / sum(e) * v[b, n, j] for j, e_j in enumerate(e))
    return y


def dot(a, b):
    return sum(x * y for x, y in zip(a.tolist(), b.tolist(), strict=True))


SIZES = B, N, L, D = 2, 2, 5, 6


def position_encodings(q, k):
    """{name: (the operator's options, the paper's logit as a function of (b, n, i, j))}"""
    slopes, table = (
        torch.tensor([0.5, 0.25], dtype=exact()),
        torch.randn(2 * 2 + 1, D, dtype=exact()),
    )
    scalars = torch.randn(N, 2 * L - 1, dtype=exact())
    rates = [10000 ** (-2 * m / D) for m in range(D // 2)]
    rope = [[f(p * rate) for rate in rates for f in (math.cos, math.sin)] for p in range(L)]
    j_minus_i = torch.arange(L) - torch.arange(L)[:, None]

    def alibi(b, n, i, j):  # Press et al., 2022: q_i k_j - m |i - j|
        return dot(q[b, n, i], k[b, n, j]) / math.sqrt(D) - slopes[n].item() * abs(i - j)

    def t5(b, n, i, j):  # Raffel et al., 2020: a scalar for each distance is added to the logit
        return dot(q[b, n, i], k[b, n, j]) / math.sqrt(D) + scalars[n, j - i + L - 1].item()

    def shaw(b, n, i, j):  # Shaw et al., 2018, equations 3 and 4
        relation = table[2 + max(-2, min(2, j - i))]
        return dot(q[b, n, i], k[b, n, j] + relation) / math.sqrt(D)

    def roformer(b, n, i, j):  # Su et al., 2021, equation 12: Re[q k* e^(i (m - n) theta)]
        pairs = (
            [complex(*pair) for pair in t.unflatten(0, (-1, 2)).tolist()]
            for t in (q[b, n, i], k[b, n, j])
        )
        rotated = [
            x * y.conjugate() * complex(math.cos((i - j) * rate), math.sin((i - j) * rate))
            for x, y, rate in zip(*pairs, rates, strict=True)
        ]
        return sum(z.real for z in rotated) / math.sqrt(D)

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
    options, logit = position_encodings(q, k)[name]
    torch.testing.assert_close(op(q, k, v, **options), scalar_attention(logit, L, v))


@OPERATORS
def test_rope_depends_on_distance_alone(op):
    """Masked keys in front of the sequence shift all positions; the result stays the same."""
    q, k, v = qkv(2, 2, 5, 6, 8, dtype=exact())
    angles = torch.outer(torch.arange(40.0), 10000 ** (-torch.arange(0.0, 8, 2) / 8)).to(exact())
    rope = torch.stack([angles.cos(), angles.sin()], -1).flatten(1)
    expected = op(q, k, v, rope=rope, causal=True)
    assert not torch.allclose(expected, op(q, k, v, rope=rope, causal=True, offset=0))
    for shift in (1, 9):
        k_, v_ = (torch.cat([torch.randn(2, 2, shift, 8).to(exact()), t], dim=2) for t in (k, v))
        mask = torch.arange(6 + shift) >= shift
        torch.testing.assert_close(op(q, k_, v_, rope=rope, causal=True, mask=mask), expected)


def rotate_half(x):
    """As in transformers' modeling_llama.py and modeling_gpt_neox.py."""
    x1, x2 = x[..., : x.shape[-1] // 2], x[..., x.shape[-1] // 2 :]
    return torch.cat((-x2, x1), dim=-1)


def llama_rotary(x, positions, R):
    """Llama's rotary embedding where R = D, and GPT-NeoX's partial one where R < D.

    x: (B, N, L, D)    positions: (L,)
    """
    inv_freq = 1.0 / (10000 ** (torch.arange(0, R, 2).double() / R))
    freqs = torch.outer(positions.double(), inv_freq)
    emb = torch.cat((freqs, freqs), dim=-1)
    cos, sin = emb.cos().to(x.dtype), emb.sin().to(x.dtype)
    x_rot, x_pass = x[..., :R], x[..., R:]
    return torch.cat((x_rot * cos + rotate_half(x_rot) * sin, x_pass), dim=-1)


def gptj_rotary(x, positions, R):
    """GPT-J's rotary embedding: pairs of neighbours among the first R elements."""
    inv_freq = 1.0 / (10000 ** (torch.arange(0, R, 2).double() / R))
    angles = torch.outer(positions.double(), inv_freq).repeat_interleave(2, dim=-1)
    cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
    x_rot, x_pass = x[..., :R], x[..., R:]
    rotate_every_two = torch.stack((-x_rot[..., 1::2], x_rot[..., ::2]), dim=-1).flatten(-2)
    return torch.cat((x_rot * cos + rotate_every_two * sin, x_pass), dim=-1)


CONVENTIONS = {"interleaved": (True, gptj_rotary), "halves": (False, llama_rotary)}
ROTARY_SIZES = [  # L, S, D, R; of the kernels packed, few_queries, blocks, and of partial vectors
    *((3, 5, 8, 8), (3, 5, 20, 20), (3, 5, 13, 6), (6, 7, 32, 18)),
    *((1, 40, 16, 16), (2, 40, 21, 10), (20, 33, 30, 30), (49, 60, 64, 16), (20, 33, 300, 300)),
]


@OPERATORS
@pytest.mark.parametrize("convention", CONVENTIONS)
@pytest.mark.parametrize(("L", "S", "D", "R"), ROTARY_SIZES)
def test_rope_is_the_formula_of_its_convention(L, S, D, R, convention, op):
    """Also for the queries' positions, which end with the last key's, and for the gradients."""
    interleaved, formula = CONVENTIONS[convention]
    q, k, v = qkv(2, 2, L, S, D, dtype=exact())
    module = nn.Rotary(D, rotary_dim=R, interleaved=interleaved)
    angles = module.options(L, S, S - L)["rope"]
    assert angles.shape[1] == R
    # the module's table is rounded to fp32; the formula's is not
    exact_table = torch.outer(torch.arange(S), 10000.0 ** -(torch.arange(0, R, 2).double() / R))
    table = torch.stack([exact_table.cos(), exact_table.sin()], -1).flatten(1).to(exact())
    torch.testing.assert_close(angles[:S], table.float())
    got = with_gradients(q, k, v, op=op, rope=table, rope_interleaved=interleaved)

    def plain(q, k, v):
        q, k = formula(q, torch.arange(S - L, S), R), formula(k, torch.arange(S), R)
        return (q @ k.mT * D**-0.5).softmax(-1) @ v

    torch.testing.assert_close(got, with_gradients(q, k, v, op=plain))


@OPERATORS
@pytest.mark.parametrize("convention", CONVENTIONS)
def test_rope_of_cached_keys_and_with_relative_keys(convention, op):
    """A rotation commutes with taking keys from the rows of a cache and with relative keys."""
    interleaved, formula = CONVENTIONS[convention]
    q, k, v = qkv(3, 2, 4, 30, 12, dtype=exact())
    rows, table = torch.randint(3, (3, 30)), torch.randn(5, 12, dtype=exact())
    rope = nn.Rotary(12, rotary_dim=8).table.to(exact())
    options = {"key_rows": rows, "relative_keys": table}
    got = op(q, k, v, rope=rope, rope_interleaved=interleaved, **options)
    copies = [
        torch.stack([torch.stack([t[r, :, j] for j, r in enumerate(row)], 1) for row in rows])
        for t in (k, v)
    ]
    rotated = formula(q, torch.arange(26, 30), 8), formula(copies[0], torch.arange(30), 8)
    expected = reference.attention(*rotated, copies[1], relative_keys=table)
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)  # the table is fp32


@pytest.mark.parametrize("R", [4, 8])
def test_multihead_attention_with_llamas_rotary(R, ops):
    layer = nn.MultiheadAttention(
        16, 2, batch_first=True, ops=ops, positions=nn.Rotary(8, rotary_dim=R, interleaved=False)
    )
    assert not any("positions" in name for name in layer.state_dict())
    x = torch.randn(2, 7, 16)
    q, k, v = (
        (x @ w.T).unflatten(-1, (2, 8)).transpose(1, 2) for w in layer.in_proj_weight.chunk(3)
    )
    q, k = (llama_rotary(t, torch.arange(7), R) for t in (q, k))
    y = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
    expected = y @ layer.out_proj.weight.T
    torch.testing.assert_close(layer(x, x, x, is_causal=True)[0], expected, rtol=1e-4, atol=1e-5)
