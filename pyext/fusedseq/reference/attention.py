from collections.abc import Sequence

import torch
from torch import Tensor

from fusedseq.reference.dropout_mask import drop, dropout_mask


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    scale: float | None = None,
    causal: bool = False,
    key_lengths: Tensor | Sequence[int] | None = None,
    mask: Tensor | None = None,
    bias: Tensor | None = None,
    alibi: Tensor | None = None,
    relative_keys: Tensor | None = None,
    rope: Tensor | None = None,
    rope_interleaved: bool = True,
    offset: int | None = None,
    key_rows: Tensor | None = None,
    dropout: float = 0.0,
    seed: int | Tensor = 0,
    window: tuple[int | None, int | None] | None = None,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
) -> Tensor:
    """Scaled dot-product attention (Vaswani et al., 2017, equation 1):

        dropout(softmax(scale * q k^T + bias, over the keys that are visible)) v

    q: (B, N, L, D) queries of N heads
    k, v: (B, N_kv, S, D) keys and values; N is a multiple of N_kv, and each N / N_kv consecutive
        query heads share one key head (grouped queries)
    scale: factor of the logits, by default 1 / sqrt(D)
    offset: the position of the first query, where key j is at position j; by default S - L, which
        aligns the last query with the last key
    causal: whether a key after the query's position is masked
    key_lengths: (B,) in [0, S], the number of valid keys of each batch entry: an int64 or int32
        tensor on the device of q or on the CPU, or a list of ints
    mask: bool, broadcastable to (B, N, L, S), true where the key is visible
    bias: broadcastable to (B, N, L, S), added to the logits; a logit of -inf masks its key
    alibi: (N,) slopes; alibi[n] * distance is subtracted from the logits (Press et al., 2022); it
        receives no gradient
    relative_keys: (2K + 1, D); row K + clip(j - i, -K, K) is added to key j for query i, i and j
        being their positions (Shaw et al., 2018, equation 4)
    rope: (P, R), the table of a rotary position embedding (Su et al., 2021): row p holds
        cos t_0, sin t_0, cos t_1, sin t_1, ... of position p, and pair m of a query or key at
        position p is rotated by t_m; R is even and at most D, and elements from R on are not
        rotated; it receives no gradient
    rope_interleaved: whether pair m is (x_2m, x_2m+1), as in the paper and in GPT-J, or
        (x_m, x_m+R/2), the "rotate half" of GPT-NeoX and Llama
    key_rows: (B, S) int64 or int32, the row of k and v that holds key j of a batch entry: a beam
        search's table, which saves copying its caches; k and v may then have any number of rows
    dropout: probability in [0, 1] that a softmax probability is dropped
    seed: seed of the dropout's mask, `dropout_mask` of shape (B, N, L, S). Calls with one seed, as
        with the default, draw one mask
    window: (left, right): a query at position p sees keys p - left to p + right (Beltagy et al.,
        2020); None or -1: all on that side. With `causal` right is 0
    softcap: above 0, a logit x becomes softcap * tanh(x / softcap) (Gemma 2, 2024), after the scale
        and before bias, alibi and masks, as in transformers and flash-attn; 0 for none
    sinks: (N,) logits that every query's softmax has beside those of its keys, with a value of zero
        (GPT-OSS, 2025; Xiao et al., 2023): the probabilities of the keys sum to less than 1.
        softcap, masks and dropout do not apply to them
    returns (B, N, L, D)

    A query without a visible key, one whose row of logits is fully masked or that meets S = 0 keys,
    gives a row of zeros and contributes zero to all gradients. Any size may be 0.
    """
    (_, N, L, D), S = q.shape, k.size(2) if key_rows is None else key_rows.size(1)
    i = torch.arange(L, device=q.device)[:, None] + (S - L if offset is None else offset)
    j = torch.arange(S, device=q.device)
    if key_rows is not None:
        k, v = (t[key_rows, :, j].transpose(1, 2) for t in (k, v))
    if rope is not None:
        q = rotate(q, rope[i.squeeze(-1)], rope_interleaved)
        k = rotate(k, rope[j], rope_interleaved)
    k, v = (t.repeat_interleave(N // max(t.size(1), 1), dim=1) for t in (k, v))

    logits = q @ k.mT  # (B, N, L, S)
    if relative_keys is not None:
        K = len(relative_keys) // 2
        row = (K + (j - i).clamp(-K, K)).expand_as(logits)
        logits = logits + (q @ relative_keys.T).gather(-1, row)
    logits = logits * (max(D, 1) ** -0.5 if scale is None else scale)
    if softcap:
        logits = softcap * (logits / softcap).tanh()
    if bias is not None:
        logits = logits + bias
    if alibi is not None:
        slopes = alibi.detach().to(torch.promote_types(alibi.dtype, q.dtype))
        logits = logits - (slopes[:, None, None] * (i - j).abs()).to(q.dtype)

    visible = logits != -torch.inf
    if causal:
        visible = visible & (j <= i)
    left, right = (None, None) if window is None else window
    if left is not None and left != -1:
        visible = visible & (j >= i - left)
    if right is not None and right != -1:
        visible = visible & (j <= i + right)
    if key_lengths is not None:
        lengths = torch.as_tensor(key_lengths, device=q.device)
        visible = visible & (j < lengths[:, None, None, None])
    if mask is not None:
        visible = visible & mask
    without_key = ~visible.any(-1, keepdim=True)
    logits = logits.masked_fill(~visible, -torch.inf).masked_fill(without_key, 0)
    if sinks is not None:
        logits = torch.cat([logits, sinks[:, None, None].expand(*logits.shape[:3], 1)], dim=-1)
    p = logits.softmax(-1)[..., :S].masked_fill(~visible, 0)
    if dropout:
        p = drop(p, dropout_mask(seed, dropout, p.shape, p.device), dropout)
    return p @ v


def rotate(x: Tensor, table: Tensor, interleaved: bool) -> Tensor:
    """Rotates the pairs of the first R columns of x (..., L, D) by the angles of a rope table,
    (L, R)."""
    cos, sin = table.detach().unflatten(-1, (-1, 2)).unbind(-1)
    pairs, pair = ((-1, 2), -1) if interleaved else ((2, -1), -2)
    a, b = x[..., : table.size(-1)].unflatten(-1, pairs).unbind(pair)
    rotated = torch.stack([a * cos - b * sin, a * sin + b * cos], dim=pair).flatten(-2)
    return torch.cat([rotated.to(x.dtype), x[..., table.size(-1) :]], dim=-1)
