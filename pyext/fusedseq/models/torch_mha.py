"""A third operator set, of row en-es/torch-mha: `fusedseq.fused`, but attention is torch.nn.MultiheadAttention.

Its parameters have the same names and shapes, so that what was trained with it decodes with the others; itself it has no cache,
and decodes whole prefixes. Its random masks are torch's own.
"""

import torch
from torch import nn

from fusedseq.fused import *  # noqa: F403  an operator set is a module of functions

HAS_CACHE = False


class MultiheadAttention(nn.MultiheadAttention):
    """torch.nn.MultiheadAttention, called as `fusedseq.nn.MultiheadAttention`.

    Errors: ValueError for positions and scales, which it does not have, and for a cache.
    """

    def __init__(
        self, embed_dim, num_heads, dropout=0.0, bias=True, *, positions=None, scale=None, ops=None, **options
    ):
        if positions is not None or scale is not None:
            raise ValueError(
                f"torch.nn.MultiheadAttention: positions and scale must be None, got {positions} and {scale}"
            )
        super().__init__(embed_dim, num_heads, dropout, bias, **options)

    def cache(self, rows, max_length):
        raise ValueError("torch.nn.MultiheadAttention has no cache: load the weights with other operators to decode")

    def forward(  # type: ignore[override]
        self, query, key, value, *, is_causal=False, key_lengths=None, cache=None
    ):  # fmt: skip
        """As fusedseq.nn.MultiheadAttention.forward, for L = S where is_causal. A row whose length is 0 gives NaN."""
        time = 1 if self.batch_first else 0
        L, S = query.size(time), key.size(time)
        padding = hidden = None
        if key_lengths is not None:
            padding = torch.arange(S, device=query.device) >= key_lengths[:, None]
        if is_causal:
            hidden = torch.ones(L, S, dtype=torch.bool, device=query.device).triu(1)
        return super().forward(query, key, value, padding, need_weights=False, attn_mask=hidden)
