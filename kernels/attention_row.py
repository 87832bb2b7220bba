"""Attention of S <= 128: all keys of a head at once, so the softmax needs no rescaling; whole backward in one pass.

Moved at B 64, L = S = 90, N 8, D 64 in bf16: forward 23.6 MB and 1.06 GFLOP (2.1 of padded tiles), 5.5 us on an H200 at 4.3 TB/s; backward
41.3 MB, 9.6 us, and 2.7 GFLOP (5.4), 6.8 us at 788 TFLOP/s: memory limits both. Tried: 64 queries in a step of backward, which spills.
Not timed on a GPU.
"""

import triton
import triton.language as tl
from fusedseq.kernels import attention_tile as t


@triton.jit(do_not_specialize=[*t.SIZES, "tiles"])
def row_forward(
    q, k, v, out, lse, q_at, k_at, v_at, terms, tiles, N, L, S, offset, threshold, scale, keep_scale, group,
    D: tl.constexpr, BD: tl.constexpr, BM: tl.constexpr, BS: tl.constexpr, CAUSAL: tl.constexpr, PRECISION: tl.constexpr,
    BYTES: tl.constexpr,
):  # fmt: skip
    """A program takes BM queries. Shapes as in packed_forward."""
    head = tl.program_id(0) // tiles
    b, n = head // N, head % N
    i, j = tl.program_id(0) % tiles * BM + tl.arange(0, BM), tl.arange(0, BS)
    x = t.tile(q, q_at, b, n, i, i < L, 0, terms.rope, i + offset, D, BD, BYTES)
    columns = j < t.end_of_keys(terms, b, S)
    source = t.key_batch(terms, b, j, columns, S)
    y = t.tile(k, k_at, source, n // group, j, columns, 0, terms.rope, j, D, BD, BYTES)
    s = tl.dot(x, tl.trans(y), input_precision=PRECISION)
    s = t.logits(s, scale, b, n, i[:, None], j[None, :], N, L, S, offset, terms, CAUSAL, True)
    p, total = t.softmax(s)
    row = t.query_row(b, n, i, N, L)
    tl.store(lse + row, total, mask=i < L)
    p = t.kept(p, terms, row, 0, BS, S, threshold, keep_scale, False).to(v.dtype.element_ty)
    y = t.tile(v, v_at, source, n // group, j, columns, 0, None, j, D, BD, BYTES)
    o = tl.dot(p, y, input_precision=PRECISION)
    t.store(out, o, b, n, i, i < L, N, L, 0, None, i, D, BD)


@triton.jit(do_not_specialize=[*t.SIZES, *t.HEADS])
def row_backward(
    dout, q, k, v, dq, dk, dv, dlogits, drelative, dout_at, q_at, k_at, v_at, terms, dq_heads, dk_heads, N, L, S, offset,
    threshold, scale, keep_scale, group,
    D: tl.constexpr, BD: tl.constexpr, BM: tl.constexpr, BS: tl.constexpr, CAUSAL: tl.constexpr, PRECISION: tl.constexpr,
    BYTES: tl.constexpr,
):  # fmt: skip
    """A program takes a head of keys, and the queries of its group in steps of BM. Shapes as in packed_backward, but for dk,
    dv: (B, N_kv, S, D), in memory (B, S, dk_heads, D)."""
    heads = N // group
    b, n_kv = tl.program_id(0) // heads, tl.program_id(0) % heads
    j = tl.arange(0, BS)
    columns = j < t.end_of_keys(terms, b, S)
    keys = t.tile(k, k_at, b, n_kv, j, columns, 0, terms.rope, j, D, BD, BYTES)
    values = t.tile(v, v_at, b, n_kv, j, columns, 0, None, j, D, BD, BYTES)
    dkeys, dvalues = tl.zeros((BS, BD), tl.float32), tl.zeros((BS, BD), tl.float32)
    tiles = tl.cdiv(L, BM)
    for step in range(group * tiles):
        n, i = n_kv * group + step // tiles, step % tiles * BM + tl.arange(0, BM)
        x = t.tile(q, q_at, b, n, i, i < L, 0, terms.rope, i + offset, D, BD, BYTES)
        do = t.tile(dout, dout_at, b, n, i, i < L, 0, None, i, D, BD, BYTES)
        s = tl.dot(x, tl.trans(keys), input_precision=PRECISION)
        s = t.logits(s, scale, b, n, i[:, None], j[None, :], N, L, S, offset, terms, CAUSAL, True)
        p, _ = t.softmax(s)
        dp = tl.dot(do, tl.trans(values), input_precision=PRECISION)
        row = t.query_row(b, n, i, N, L)
        dp = t.kept(dp, terms, row, 0, BS, S, threshold, keep_scale, False)
        ds = p * (dp - tl.sum(p * dp, 1)[:, None])
        if dlogits is not None:
            tl.store(dlogits + row[:, None] * S + j[None, :], ds, mask=(i < L)[:, None] & (j < S)[None, :])
        if drelative is not None:
            low, high = t.store_relative(
                drelative, ds * scale, row[:, None], i[:, None], j[None, :], S, L, offset, terms
            )
            t.store_relative_ends(drelative, low, high, row, i < L, terms)
        p = t.kept(p, terms, row, 0, BS, S, threshold, keep_scale, False).to(v.dtype.element_ty)
        ds = (ds * scale).to(q.dtype.element_ty)
        if dv is not None:
            dvalues = tl.dot(tl.trans(p), do, dvalues, input_precision=PRECISION)
        if dk is not None:
            dkeys = tl.dot(tl.trans(ds), x, dkeys, input_precision=PRECISION)
        if dq is not None:
            g = tl.dot(ds, keys, input_precision=PRECISION)
            t.store(dq, g, b, n, i, i < L, dq_heads, L, 0, terms.rope, i + offset, D, BD)
    if dv is not None:
        t.store(dv, dvalues, b, n_kv, j, j < S, dk_heads, S, 0, None, j, D, BD)
    if dk is not None:
        t.store(dk, dkeys, b, n_kv, j, j < S, dk_heads, S, 0, terms.rope, j, D, BD)
