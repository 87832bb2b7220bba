"""Speeds up an existing Transformer: converts torch's modules, with their trained weights.

Two ways are shown: a single torch.nn.MultiheadAttention, and a whole torch.nn.TransformerEncoder.
"""

import torch
from fusedseq import nn as fnn
from fusedseq.models import convert
from torch import nn

torch.manual_seed(0)
B, L, E, N = 32, 20, 64, 8  # batch, sequence length, model width, heads
x = torch.randn(B, L, E)
lengths = torch.randint(1, L + 1, (B,))  # of each sequence in the batch
padding = torch.arange(L) >= lengths[:, None]  # (B, L), True where torch must not look

# 1. One attention module: the same parameters under the same names, so the state dict loads.
theirs = nn.MultiheadAttention(E, N, batch_first=True)
ours = fnn.MultiheadAttention(E, N, batch_first=True)
ours.load_state_dict(theirs.state_dict())
expected, _ = theirs(x, x, x, key_padding_mask=padding, need_weights=False)
# The lengths of the sequences say the same as the padding mask, and are cheaper.
result, _ = ours(x, x, x, key_lengths=lengths)
print(f"attention: largest difference {(result - expected).abs().max():.1e}")
torch.testing.assert_close(result, expected)

# 2. A stack of layers: `convert` copies sizes, options and weights.
layer = nn.TransformerEncoderLayer(E, N, dim_feedforward=128, batch_first=True, norm_first=True)
theirs = nn.TransformerEncoder(layer, num_layers=3, enable_nested_tensor=False).eval()
ours = convert.encoder(theirs)
expected = theirs(x, src_key_padding_mask=padding)
result = ours(x, lengths)
real = ~padding  # what stands at padded positions has no meaning
print(f"encoder: largest difference {(result - expected)[real].abs().max():.1e}")
torch.testing.assert_close(result[real], expected[real], rtol=1e-4, atol=1e-5)

# The converted encoder is an ordinary module: it trains, saves and loads.
ours.train()
ours(x, lengths)[real].square().mean().backward()
print(f"parameters with a gradient: {sum(p.grad is not None for p in ours.parameters())}")
