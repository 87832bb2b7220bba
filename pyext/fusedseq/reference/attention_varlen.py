from typing import Any, cast

import torch
from torch import Tensor

from fusedseq.reference.attention import attention


def attention_varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    *,
    scale: float | None = None,
    causal: bool = False,
    mask: Tensor | None = None,
    bias: Tensor | None = None,
    alibi: Tensor | None = None,
    relative_keys: Tensor | None = None,
    rope: Tensor | None = None,
    rope_interleaved: bool = True,
    dropout: float = 0.0,
    seed: int | Tensor = 0,
    window: tuple[int | None, int | None] | None = None,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
) -> Tensor:
    """`attention` of B sequences of different lengths that follow each other without padding: the
    same result as of the sequences alone, or of a padded batch with key_lengths, with the argument
    names of flash-attn (Dao, 2023).

    q: (queries, N, D)    k, v: (keys, N_kv, D), of all sequences
    cu_seqlens_q, cu_seqlens_k: (B + 1,) int32 or int64: sequence b has the rows cu_seqlens[b] to
        cu_seqlens[b + 1] - 1; the first is 0 and the last the number of rows
    max_seqlen_q, max_seqlen_k: at least the length of the longest sequence, by default that length
    mask, bias: broadcastable to (B, N, max_seqlen_q, max_seqlen_k)
    dropout, seed: the mask is `dropout_mask` of that shape, hence that of the padded batch
    other arguments: as of `attention`, for each sequence. Its last query is aligned with its last
        key
    returns (queries, N, D)
    """
    options: dict[str, Any] = dict(locals())
    for name in ("q", "k", "v", "cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k"):
        del options[name]
    queries, keys = cu_seqlens_q.diff(), cu_seqlens_k.diff()  # (B,)
    L = longest(queries) if max_seqlen_q is None else max_seqlen_q
    S = longest(keys) if max_seqlen_k is None else max_seqlen_k
    q = padded(q, cu_seqlens_q, L)  # (B, N, L, D)
    k, v = padded(k, cu_seqlens_k, S), padded(v, cu_seqlens_k, S)
    if rope is not None:  # rows for the positions of padding
        options["rope"] = torch.cat([rope, rope[-1:].expand(L + S, -1)]) if len(rope) else rope
    offset = (keys - queries)[:, None, None, None]  # of each sequence
    out = attention(q, k, v, key_lengths=keys, offset=cast(int, offset), **options)
    is_query = torch.arange(L, device=q.device) < queries[:, None]  # (B, L)
    b, i = is_query.nonzero(as_tuple=True)
    return out[b, :, i]


def longest(lengths: Tensor) -> int:
    return int(lengths.max()) if len(lengths) else 0


def padded(x: Tensor, cu_seqlens: Tensor, L: int) -> Tensor:
    """Returns sequences (rows, N, D) as (B, N, L, D), with any finite rows as padding."""
    rows = cu_seqlens[:-1, None] + torch.arange(L, device=x.device)
    x = torch.cat([x, x.new_zeros(1, *x.shape[1:])])  # a row even where there is none
    return x[rows.clamp(max=len(x) - 1)].transpose(1, 2)
