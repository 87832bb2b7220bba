"""Attention of L, S <= 16: each program, one warp, takes G pairs of a batch row and a head, whole backward in one pass.

Moved at B 2048, L = S = 6, N 8, D 32 in bf16: forward 25.2 MB and 2 GFLOP of padded tiles, 5.9 us on an H200 at 4.3 TB/s; backward
44.0 MB, 10.2 us (it reads neither out nor lse). Limited by memory: compiled for sm_90 a prototype of this layout, a batched product
of G 16 x D tiles, was 216 warp instructions a pair forward and 375 backward, 3.4 and 6.1 us at the issue rate of 132 multiprocessors.
Tried there: two-dimensional block-diagonal products (140, forward only), no tensor cores (346 to 1000), more warps (1.5 to 4 times
as many). Not timed on a GPU.
"""

import triton
import triton.language as tl
from fusedseq.kernels import attention_tile as t

TILE = tl.constexpr(16)  # least size of a product


@triton.jit
def _pairs_of_program(count, N, G: tl.constexpr):
    """Batch row and head of this program's pairs, (G, 1) each, and which there are; the others repeat the last."""
    pair = tl.program_id(0) * G + tl.arange(0, G)[:, None]
    there = pair < count
    pair = tl.minimum(pair, count - 1)
    return pair // N, pair % N, there


@triton.jit
def _logits(
    q, k, q_at, k_at, b, n, terms, N, L, S, offset, scale, group,
    D: tl.constexpr, BD: tl.constexpr, G: tl.constexpr, CAUSAL: tl.constexpr, PRECISION: tl.constexpr, BYTES: tl.constexpr,
):  # fmt: skip
    i, j = tl.arange(0, TILE)[None, :], tl.arange(0, TILE)[None, :]
    columns = j < t.end_of_keys(terms, b, S)
    source = t.key_batch(terms, b, j, columns, S)
    qk = tl.zeros((G, TILE, TILE), tl.float32)
    for first in range(0, D, BD):
        x = t.tile(q, q_at, b, n, i, i < L, first, terms.rope, i + offset, D, BD, BYTES)
        y = t.tile(k, k_at, source, n // group, j, columns, first, terms.rope, j, D, BD, BYTES)
        qk = tl.dot(x, t.transposed(y), qk, input_precision=PRECISION)
    at_i, at_j = tl.arange(0, TILE)[None, :, None], tl.arange(0, TILE)[None, None, :]
    return t.logits(qk, scale, b[:, :, None], n[:, :, None], at_i, at_j, N, L, S, offset, terms, CAUSAL, True)


@triton.jit(do_not_specialize=[*t.SIZES, "count"])
def packed_forward(
    q, k, v, out, lse, q_at, k_at, v_at, terms, count, N, L, S, offset, threshold, scale, keep_scale, group,
    D: tl.constexpr, BD: tl.constexpr, G: tl.constexpr, CAUSAL: tl.constexpr, PRECISION: tl.constexpr, BYTES: tl.constexpr,
):  # fmt: skip
    """q: (B, N, L, D)    k, v: (B, N_kv, S, D)    out: (B, N, L, D), in memory (B, L, N, D)    lse: (B, N, L) fp32"""
    b, n, there = _pairs_of_program(count, N, G)
    i, j = tl.arange(0, TILE)[None, :], tl.arange(0, TILE)[None, :]
    rows = there & (i < L)
    s = _logits(q, k, q_at, k_at, b, n, terms, N, L, S, offset, scale, group, D, BD, G, CAUSAL, PRECISION, BYTES)
    p, total = t.softmax(s)
    row = t.query_row(b, n, i, N, L)
    tl.store(lse + row, total, mask=rows)
    p = t.kept(p, terms, row, 0, TILE, S, threshold, keep_scale, False).to(v.dtype.element_ty)
    columns = j < t.end_of_keys(terms, b, S)
    source = t.key_batch(terms, b, j, columns, S)
    for first in range(0, D, BD):
        y = t.tile(v, v_at, source, n // group, j, columns, first, None, j, D, BD, BYTES)
        o = tl.dot(p, y, input_precision=PRECISION)
        t.store(out, o, b, n, i, rows, N, L, first, None, i, D, BD)


@triton.jit(do_not_specialize=[*t.SIZES, *t.HEADS, "count"])
def packed_backward(
    dout, q, k, v, dq, dk, dv, dlogits, drelative, dout_at, q_at, k_at, v_at, terms, count, dq_heads, dk_heads, N, L, S, offset,
    threshold, scale, keep_scale, group,
    D: tl.constexpr, BD: tl.constexpr, G: tl.constexpr, CAUSAL: tl.constexpr, PRECISION: tl.constexpr, BYTES: tl.constexpr,
):  # fmt: skip
    """dq: (B, N, L, D), dk, dv: (B, N, S, D), of each query head, in memory (B, L or S, dq_heads or dk_heads, D) with at least N
    heads in a row; None where not needed

    dlogits: (B, N, L, S) fp32 or None    drelative: as terms.relative, fp32, zeros before, or None
    """
    b, n, there = _pairs_of_program(count, N, G)
    i, j = tl.arange(0, TILE)[None, :], tl.arange(0, TILE)[None, :]
    rows, columns = i < L, j < t.end_of_keys(terms, b, S)
    s = _logits(q, k, q_at, k_at, b, n, terms, N, L, S, offset, scale, group, D, BD, G, CAUSAL, PRECISION, BYTES)
    p, _ = t.softmax(s)
    dp = tl.zeros((G, TILE, TILE), tl.float32)
    for first in range(0, D, BD):
        do = t.tile(dout, dout_at, b, n, i, rows, first, None, i, D, BD, BYTES)
        y = t.tile(v, v_at, b, n // group, j, columns, first, None, j, D, BD, BYTES)
        dp = tl.dot(do, t.transposed(y), dp, input_precision=PRECISION)
    row = t.query_row(b, n, i, N, L)
    dp = t.kept(dp, terms, row, 0, TILE, S, threshold, keep_scale, False)
    ds = p * (dp - t.last(tl.sum(p * dp, 2)))
    at_i, at_j = tl.arange(0, TILE)[None, :, None], tl.arange(0, TILE)[None, None, :]
    if dlogits is not None:
        tl.store(dlogits + t.last(row) * S + at_j, ds, mask=t.last(there & rows) & (at_j < S))
    if drelative is not None:
        low, high = t.store_relative(drelative, ds * scale, t.last(row), at_i, at_j, S, L, offset, terms)
        t.store_relative_ends(drelative, low, high, row, rows, terms)
    p = t.kept(p, terms, row, 0, TILE, S, threshold, keep_scale, False).to(v.dtype.element_ty)
    ds = (ds * scale).to(q.dtype.element_ty)
    for first in range(0, D, BD):
        do = t.tile(dout, dout_at, b, n, i, rows, first, None, i, D, BD, BYTES)
        x = t.tile(q, q_at, b, n, i, rows, first, terms.rope, i + offset, D, BD, BYTES)
        y = t.tile(k, k_at, b, n // group, j, columns, first, terms.rope, j, D, BD, BYTES)
        if dv is not None:
            g = tl.dot(t.transposed(p), do, input_precision=PRECISION)
            t.store(dv, g, b, n, j, there & (j < S), dk_heads, S, first, None, j, D, BD)
        if dk is not None:
            g = tl.dot(t.transposed(ds), x, input_precision=PRECISION)
            t.store(dk, g, b, n, j, there & (j < S), dk_heads, S, first, terms.rope, j, D, BD)
        if dq is not None:
            g = tl.dot(ds, y, input_precision=PRECISION)
            t.store(dq, g, b, n, i, there & rows, dq_heads, L, first, terms.rope, i + offset, D, BD)
