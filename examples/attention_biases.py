"""Calls `attention` with every kind of mask, bias and position, and compares it with its oracle.

All of them are arguments of one operator, and they can be combined. No tensor of shape (B, N, L, S)
is made, unless you give a mask or bias of that shape.
"""

import torch
from fusedseq import fused, nn, reference

torch.manual_seed(0)
B, N, L, D = 4, 8, 24, 16  # batch, heads, length, width of a head
q, k, v = torch.randn(3, B, N, L, D)


def at(module):
    """The tensor of a positions module for L queries at positions 0 .. L - 1 and L keys."""
    return module(L, L, 0)


ways = {
    "plain": {},
    "causal: no key after the query": {"causal": True},
    "key lengths: padded batches": {"key_lengths": torch.randint(1, L + 1, (B,))},
    "mask: any boolean one, True = seen": {"mask": torch.rand(B, 1, L, L) < 0.8},
    "bias: any tensor, added to the logits": {"bias": torch.randn(N, L, L)},
    "ALiBi (Press et al., 2022)": {"alibi": at(nn.ALiBi(N))},
    "T5's relative bias (Raffel et al., 2020)": {"bias": at(nn.RelativeBias(N))},
    "relative keys (Shaw et al., 2018)": {"relative_keys": at(nn.RelativeKeys(8, D))},
    "rotary positions (Su et al., 2021)": {"rope": at(nn.Rotary(D))},
    "dropout of the probabilities": {"dropout": 0.1, "seed": 7},
}
ways["all of causal, lengths, ALiBi and dropout"] = {
    name: value
    for way in ("causal: no key after the query", "key lengths: padded batches")
    for name, value in ways[way].items()
} | {"alibi": at(nn.ALiBi(N)), "dropout": 0.1, "seed": 7}

for name, options in ways.items():
    result = fused.attention(q, k, v, **options)
    expected = reference.attention(q, k, v, **options)
    print(f"{name:45} largest difference {(result - expected).abs().max():.0e}")
    torch.testing.assert_close(result, expected, rtol=1e-4, atol=1e-5)

# A module takes the positions as an argument, and gives them the lengths of each call.
layer = nn.MultiheadAttention(N * D, N, batch_first=True, positions=nn.Rotary(D))
x = torch.randn(B, L, N * D)
y, _ = layer(x, x, x, is_causal=True)
print(f"\nMultiheadAttention with rotary positions: {tuple(x.shape)} -> {tuple(y.shape)}")
