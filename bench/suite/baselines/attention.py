"""Attention baselines: torch's fused operator, and the formula written out."""

import torch
from torch.nn import functional as F

from bench.suite.baselines.unsupported import reject_options


def attention(
    q,
    k,
    v,
    *,
    scale=None,
    causal=False,
    key_lengths=None,
    mask=None,
    bias=None,
    alibi=None,
    relative_keys=None,
    rope=None,
    rope_interleaved=True,
    offset=None,
    key_rows=None,
    dropout=0.0,
    seed=None,
    window=None,
    softcap=0.0,
    sinks=None,
):
    """F.scaled_dot_product_attention; options it has no argument for become its `attn_mask`."""
    reject_options(key_rows=key_rows, softcap=softcap or None, sinks=sinks)
    (L, S), D = (q.size(2), k.size(2)), q.size(3)
    q, k = apply_rope(q, k, rope, offset, rope_interleaved)
    mask = with_window(mask, window, q, S, offset)
    extras = key_lengths, mask, bias, alibi, relative_keys, offset
    # Only is_causal without a mask lets torch choose its FlashAttention kernel.
    is_causal = causal and L == S and all(option is None for option in extras)
    scale_used = D**-0.5 if scale is None else scale
    attn_mask = None
    if not is_causal:
        attn_mask = attention_mask(
            q, S, causal, key_lengths, mask, bias, alibi, relative_keys, scale_used, offset
        )
    return F.scaled_dot_product_attention(
        q, k, v, attn_mask, dropout, is_causal, scale=scale, enable_gqa=q.size(1) != k.size(1)
    )


def attention_eager(
    q,
    k,
    v,
    *,
    scale=None,
    causal=False,
    key_lengths=None,
    mask=None,
    bias=None,
    alibi=None,
    relative_keys=None,
    rope=None,
    rope_interleaved=True,
    offset=None,
    key_rows=None,
    dropout=0.0,
    seed=None,
    window=None,
    softcap=0.0,
    sinks=None,
):
    """The formula softmax(q k^T) v written out, as many models contain it."""
    reject_options(key_rows=key_rows)
    mask = with_window(mask, window, q, k.size(2), offset)
    scale = q.size(3) ** -0.5 if scale is None else scale
    q, k = apply_rope(q, k, rope, offset, rope_interleaved)
    terms = attention_mask(
        q, k.size(2), causal, key_lengths, mask, bias, alibi, relative_keys, scale, offset
    )
    if q.size(1) != k.size(1):  # grouped queries
        k, v = (t.repeat_interleave(q.size(1) // t.size(1), dim=1) for t in (k, v))
    logits = q @ k.mT * scale
    if softcap:
        logits = softcap * (logits / softcap).tanh()
    if terms is not None and terms.dtype == torch.bool:
        logits = logits.masked_fill(~terms, -torch.inf)
    elif terms is not None:
        logits = logits + terms
    if sinks is not None:  # a key more, without a value
        sink = sinks[:, None, None].expand(*logits.shape[:-1], 1)
        probabilities = torch.cat([logits, sink], -1).softmax(-1)[..., :-1]
    else:
        probabilities = logits.softmax(-1)
    return F.dropout(probabilities, dropout) @ v


def attention_varlen(
    q,
    k,
    v,
    cu_seqlens_q,
    cu_seqlens_k,
    max_seqlen_q=None,
    max_seqlen_k=None,
    *,
    scale=None,
    causal=False,
    mask=None,
    bias=None,
    alibi=None,
    relative_keys=None,
    rope=None,
    rope_interleaved=True,
    dropout=0.0,
    seed=None,
    window=None,
    softcap=0.0,
    sinks=None,
):
    """F.scaled_dot_product_attention of the padded batch, for keys of the queries' lengths."""
    others = mask, bias, alibi, relative_keys, rope, window, sinks, softcap or None, causal or None
    reject_options(**{str(i): option for i, option in enumerate(others)})
    is_row = torch.arange(max_seqlen_q) < cu_seqlens_q.diff()[:, None]  # (B, L)
    padded = []
    for x in (q, k, v):
        batch = x.new_zeros(*is_row.shape, *x.shape[1:])
        batch[is_row] = x
        padded.append(batch.transpose(1, 2))
    y = F.scaled_dot_product_attention(*padded, is_row[:, None, None], dropout, scale=scale)
    return y.transpose(1, 2)[is_row]


def with_window(mask, window, q, S, offset):
    """Returns the mask with that of a window, or None."""
    if window is None:
        return mask
    L = q.size(2)
    i = torch.arange(L, device=q.device)[:, None] + (S - L if offset is None else offset)
    j = torch.arange(S, device=q.device)
    left, right = (S + L if n is None or n < 0 else n for n in window)
    seen = (j >= i - left) & (j <= i + right)
    return seen if mask is None else mask & seen


def attention_mask(q, S, causal, key_lengths, mask, bias, alibi, relative_keys, scale, offset):
    """Returns a boolean mask, or the sum of everything that is added to the logits, or None."""
    L = q.size(2)
    i = torch.arange(L, device=q.device)[:, None] + (S - L if offset is None else offset)
    j = torch.arange(S, device=q.device)
    masks = [
        j <= i if causal else None,
        None if key_lengths is None else j < key_lengths[:, None, None, None],
        mask,
    ]
    visible = None
    for each in masks:
        if each is not None:
            visible = each if visible is None else visible & each
    terms = bias
    if alibi is not None:
        distance_bias = -alibi[:, None, None] * (i - j).abs()
        terms = distance_bias if terms is None else terms + distance_bias
    if relative_keys is not None:
        K = len(relative_keys) // 2
        index = K + (j - i).clamp(-K, K)
        relative = scale * (q @ relative_keys.T).gather(-1, index.expand(*q.shape[:3], S))
        terms = relative if terms is None else terms + relative
    if terms is None:
        return visible
    return terms if visible is None else terms.masked_fill(~visible, -torch.inf)


def apply_rope(q, k, rope, offset, interleaved):
    """Rotates queries and keys by the rotary embedding's table, if there is one."""
    if rope is None:
        return q, k
    L, S = q.size(2), k.size(2)
    start = S - L if offset is None else offset
    return rotate(q, rope[start : start + L], interleaved), rotate(k, rope[:S], interleaved)


def rotate(x, table, interleaved):
    """Multiplies pairs of the first elements, read as complex numbers, by the table's. There are no
    complex numbers of bf16, so these are multiplied in fp32, as in Llama's code."""
    if x.dtype == torch.bfloat16:
        return rotate(x.float(), table.float(), interleaved).to(x.dtype)
    whole, rest = x[..., : table.size(-1)], x[..., table.size(-1) :]
    if not interleaved:
        whole = whole.unflatten(-1, (2, -1)).mT.flatten(-2)
    pairs, angles = (torch.view_as_complex(t.unflatten(-1, (-1, 2))) for t in (whole, table))
    rotated = torch.view_as_real(pairs * angles)
    rotated = (rotated if interleaved else rotated.mT).flatten(-2)
    return torch.cat([rotated, rest], dim=-1) if rest.size(-1) else rotated
