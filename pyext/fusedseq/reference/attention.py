import torch

from fusedseq.reference.dropout_mask import drop, dropout_mask


def attention(
    q, k, v, *, scale=None, causal=False, key_lengths=None, mask=None, bias=None, alibi=None, relative_keys=None,
    rope=None, offset=None, key_rows=None, dropout=0.0, seed=0,
):  # fmt: skip
    """Scaled dot-product attention (Vaswani et al., 2017): dropout(softmax(scale q k^T + bias, masked)) v.

    q: (B, N, L, D)    k, v: (B, N_kv, S, D), N a multiple of N_kv: N / N_kv heads in a row share one (grouped queries)
    returns (B, N, L, D)

    scale: by default 1/sqrt(D)
    offset: the position of the first query, key j being at position j; by default S - L, which aligns the ends
    causal: a query sees no key behind its own position
    key_lengths: (B,) int64, the keys of each batch row that there are    mask: bool, broadcastable to (B, N, L, S), True = seen
    bias: broadcastable to (B, N, L, S), added to the logits; a logit of -inf masks its key
    alibi: (N,), subtracts alibi[n] * distance (Press et al., 2022); no gradient
    relative_keys: (2K + 1, D), row K + clip(j - i, -K, K) added to key j for query i, i and j their positions (Shaw et
        al., 2018, equation 4)
    rope: (P, D), rotates queries and keys (Su et al., 2021): row p is cos t_0, sin t_0, cos t_1, sin t_1, ... of
        position p, and the pair (x_2m, x_2m+1) is turned by t_m; D is even; no gradient
    key_rows: (B, S) int64, the row of k and v in which key j of a batch row stands (a beam search's table, in place of
        copies of the caches); k and v then have any number of rows
    dropout: in [0, 1], of the probabilities    seed: of its mask, `dropout_mask`'s of shape (B, N, L, S)

    A query that sees no key has the result 0, and gradients 0.
    """
    (_, N, L, D), S = q.shape, k.size(2) if key_rows is None else key_rows.size(1)
    i = torch.arange(L, device=q.device)[:, None] + (S - L if offset is None else offset)
    j = torch.arange(S, device=q.device)
    if key_rows is not None:
        k, v = (t[key_rows, :, j].transpose(1, 2) for t in (k, v))
    if rope is not None:
        q, k = rotate(q, rope[i[:, 0]]), rotate(k, rope[j])
    k, v = (t.repeat_interleave(N // t.size(1), dim=1) for t in (k, v))

    logits = q @ k.mT  # (B, N, L, S)
    if relative_keys is not None:
        K = len(relative_keys) // 2
        logits = logits + torch.einsum("bnid,ijd->bnij", q, relative_keys[K + (j - i).clamp(-K, K)])
    logits = logits * (D**-0.5 if scale is None else scale)
    if bias is not None:
        logits = logits + bias
    if alibi is not None:
        logits = logits - (alibi.detach()[:, None, None] * (i - j).abs()).to(q.dtype)

    seen = logits != -torch.inf
    if causal:
        seen = seen & (j <= i)
    if key_lengths is not None:
        seen = seen & (j < key_lengths[:, None, None, None])
    if mask is not None:
        seen = seen & mask
    blind = ~seen.any(-1, keepdim=True)
    p = logits.masked_fill(~seen, -torch.inf).masked_fill(blind, 0).softmax(-1).masked_fill(~seen, 0)
    if dropout:
        p = drop(p, dropout_mask(seed, dropout, p.shape, p.device), dropout)
    return p @ v


def rotate(x, table):
    """The pairs of x (..., L, D) turned by the angles of table (L, D)."""
    (cos, sin), (a, b) = table.detach().unflatten(-1, (-1, 2)).unbind(-1), x.unflatten(-1, (-1, 2)).unbind(-1)
    return torch.stack([a * cos - b * sin, a * sin + b * cos], dim=-1).flatten(-2).to(x.dtype)
