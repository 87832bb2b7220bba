"""Attention of any length, over tiles of keys with a running softmax, after FlashAttention-2 (Dao, 2023); no atomics.

FLOPs of B N heads: 4 L S D forward, 10 L S D backward (14 here: logits and their gradient are formed in both kernels), half of it
where causal. Bytes, 2 (2 L + 2 S) D forward, matter below L of about 300 only. B 4, N 16, L = S = 4096, D 128 in bf16: 0.55 TFLOP, 0.70 ms
on an H200 at 788 TFLOP/s; backward 1.92 TFLOP, 2.4 ms. Published kernels of this plan in Triton reach 330 to 480 TFLOP/s forward. Limited
by the tensor cores, then by exp2. Wide heads go by chunks: a program forms the whole logits, and of the result BD columns
alone. Tried: tl.range(..., warp_specialize=True), on which the compiler of Triton 3.7.1 fails for sm_90 ("PassManager::run failed", in
NVGPUWarpSpecialization), for both loops and for the first alone. For decoding (L <= 4) with long caches see
attention_split.py. Not timed on a GPU.
"""

import triton
import triton.language as tl
from fusedseq.kernels import attention_tile as t


@triton.jit
def _products(
    x, q, k, q_at, k_at, b, n, source, n_kv, i, j, rows, columns, rope, offset,
    D: tl.constexpr, BD: tl.constexpr, TRANSPOSED: tl.constexpr, PRECISION: tl.constexpr, BYTES: tl.constexpr,
):  # fmt: skip
    """q k^T over all chunks of D, or k q^T if TRANSPOSED; x: the one of the two that stays, loaded, or None."""
    if x is None:
        qk = tl.zeros((j.shape[0], i.shape[0]) if TRANSPOSED else (i.shape[0], j.shape[0]), tl.float32)
        for first in range(0, D, BD):
            a = t.tile(q, q_at, b, n, i, rows, first, rope, i + offset, D, BD, BYTES)
            c = t.tile(k, k_at, source, n_kv, j, columns, first, rope, j, D, BD, BYTES)
            if TRANSPOSED:
                qk = tl.dot(c, tl.trans(a), qk, input_precision=PRECISION)
            else:
                qk = tl.dot(a, tl.trans(c), qk, input_precision=PRECISION)
        return qk
    elif TRANSPOSED:
        a = t.tile(q, q_at, b, n, i, rows, 0, rope, i + offset, D, BD, BYTES)
        return tl.dot(x, tl.trans(a), input_precision=PRECISION)
    else:
        c = t.tile(k, k_at, source, n_kv, j, columns, 0, rope, j, D, BD, BYTES)
        return tl.dot(x, tl.trans(c), input_precision=PRECISION)


@triton.jit
def key_range(terms, b, first_query, S, offset, CAUSAL: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr):
    """Of the keys that a tile of queries sees: the end of the tiles that all of it sees whole, and the end."""
    whole = t.end_of_keys(terms, b, S)
    end = whole
    if CAUSAL:
        whole = tl.minimum(whole, first_query + offset + 1)
        end = tl.minimum(end, first_query + offset + BM)
    return tl.maximum(whole, 0) // BN * BN, tl.maximum(end, 0)


@triton.jit
def attend(
    acc, top, total, x, begin, end, q, k, v, q_at, k_at, v_at, terms, b, n, n_kv, i, row, first,
    N, L, S, offset, threshold, scale, keep_scale,
    D: tl.constexpr, BD: tl.constexpr, BN: tl.constexpr, CAUSAL: tl.constexpr, PRECISION: tl.constexpr, BYTES: tl.constexpr,
    EDGE: tl.constexpr,
):  # fmt: skip
    """The running softmax over keys begin : end, which begin at a multiple of BN."""
    keys = t.end_of_keys(terms, b, S)
    for j0 in range(begin, end, BN):
        j = j0 + tl.arange(0, BN)
        source = t.key_batch(terms, b, j, j < keys, S)
        s = _products(x, q, k, q_at, k_at, b, n, source, n_kv, i, j, i < L, j < keys, terms.rope, offset, D, BD, False,
                      PRECISION, BYTES)  # fmt: skip
        s = t.logits(s, scale, b, n, i[:, None], j[None, :], N, L, S, offset, terms, CAUSAL, EDGE)
        new = tl.maximum(top, tl.max(s, 1))
        shift = tl.where(new == float("-inf"), 0.0, new)
        p = tl.math.exp2(s - shift[:, None])
        shrink = tl.math.exp2(top - shift)
        total = total * shrink + tl.sum(p, 1)
        p = t.kept(p, terms, row, j0, BN, S, threshold, keep_scale, False).to(v.dtype.element_ty)
        y = t.tile(v, v_at, source, n_kv, j, j < keys, first, None, j, D, BD, BYTES)
        acc = tl.dot(p, y, acc * shrink[:, None], input_precision=PRECISION)
        top = new
    return acc, top, total


@triton.jit(do_not_specialize=[*t.SIZES, "tiles"])
def tiled_forward(
    q, k, v, out, lse, q_at, k_at, v_at, terms, tiles, N, L, S, offset, threshold, scale, keep_scale, group,
    D: tl.constexpr, BD: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, CAUSAL: tl.constexpr, PRECISION: tl.constexpr,
    BYTES: tl.constexpr,
):  # fmt: skip
    """A program takes BM queries, and of the result BD columns. Shapes as in packed_forward."""
    chunks: tl.constexpr = (D + BD - 1) // BD
    program, first = tl.program_id(0) // chunks, tl.program_id(0) % chunks * BD
    head, step = program // tiles, tiles - 1 - program % tiles  # where causal the longest first
    b, n = head // N, head % N
    i = step * BM + tl.arange(0, BM)
    row = t.query_row(b, n, i, N, L)
    if chunks == 1:
        x = t.tile(q, q_at, b, n, i, i < L, 0, terms.rope, i + offset, D, BD, BYTES)
    else:
        x = None
    acc, total = tl.zeros((BM, BD), tl.float32), tl.zeros((BM,), tl.float32)
    top = tl.full((BM,), float("-inf"), tl.float32)
    whole, end = key_range(terms, b, step * BM, S, offset, CAUSAL, BM, BN)
    acc, top, total = attend(
        acc, top, total, x, 0, whole, q, k, v, q_at, k_at, v_at, terms, b, n, n // group, i, row, first,
        N, L, S, offset, threshold, scale, keep_scale, D, BD, BN, CAUSAL, PRECISION, BYTES, False,
    )  # fmt: skip
    acc, top, total = attend(
        acc, top, total, x, whole, end, q, k, v, q_at, k_at, v_at, terms, b, n, n // group, i, row, first,
        N, L, S, offset, threshold, scale, keep_scale, D, BD, BN, CAUSAL, PRECISION, BYTES, True,
    )  # fmt: skip
    blind = total == 0
    total = tl.where(blind, 1.0, total)
    acc = acc / total[:, None]
    t.store(out, acc, b, n, i, i < L, N, L, first, None, i, D, BD)
    if first == 0:
        total = tl.where(blind, float("inf"), (top + tl.math.log2(total)) * t.LN2)
        tl.store(lse + row, total, mask=i < L)


@triton.jit(do_not_specialize=["tiles", "N", "L"])
def tiled_delta(
    dout, out, delta, dout_at, out_at, tiles, N, L,
    D: tl.constexpr, BD: tl.constexpr, BM: tl.constexpr, BYTES: tl.constexpr,
):  # fmt: skip
    """delta: (B, N, L) fp32, the product of each row of dout and out: what softmax's gradient subtracts. Bound by memory."""
    head = tl.program_id(0) // tiles
    b, n = head // N, head % N
    i = tl.program_id(0) % tiles * BM + tl.arange(0, BM)
    total = tl.zeros((BM,), tl.float32)
    for first in range(0, D, BD):
        do = t.tile(dout, dout_at, b, n, i, i < L, first, None, i, D, BD, BYTES)
        o = t.tile(out, out_at, b, n, i, i < L, first, None, i, D, BD, BYTES)
        total += tl.sum(do.to(tl.float32) * o.to(tl.float32), 1)
    tl.store(delta + t.query_row(b, n, i, N, L), total, mask=i < L)


@triton.jit
def _gradients(
    x, do, dout, q, k, v, lse, delta, dout_at, q_at, k_at, v_at, terms, b, n, n_kv, i, j, j0,
    N, L, S, offset, threshold, scale, keep_scale,
    D: tl.constexpr, BD: tl.constexpr, BN: tl.constexpr, CAUSAL: tl.constexpr, PRECISION: tl.constexpr, BYTES: tl.constexpr,
    EDGE: tl.constexpr, TRANSPOSED: tl.constexpr,
):  # fmt: skip
    """The dropped-out probabilities of a tile, and the gradient of its logits: (queries, keys), or transposed.

    x, do: what stays of the factors of the two products, loaded, or None
    """
    columns = j < t.end_of_keys(terms, b, S)
    s = _products(x, q, k, q_at, k_at, b, n, b, n_kv, i, j, i < L, columns, terms.rope, offset, D, BD, TRANSPOSED,
                  PRECISION, BYTES)  # fmt: skip
    dp = _products(do, dout, v, dout_at, v_at, b, n, b, n_kv, i, j, i < L, columns, None, offset, D, BD, TRANSPOSED,
                   PRECISION, BYTES)  # fmt: skip
    row = t.query_row(b, n, i, N, L)
    total = tl.load(lse + row, mask=i < L, other=float("inf")) * t.LOG2E
    shift = tl.load(delta + row, mask=i < L, other=0.0)
    if TRANSPOSED:
        s = t.logits(s, scale, b, n, i[None, :], j[:, None], N, L, S, offset, terms, CAUSAL, EDGE)
        total, shift = total[None, :], shift[None, :]
    else:
        s = t.logits(s, scale, b, n, i[:, None], j[None, :], N, L, S, offset, terms, CAUSAL, EDGE)
        total, shift = total[:, None], shift[:, None]
    p = tl.math.exp2(s - total)
    dp = t.kept(dp, terms, row, j0, BN, S, threshold, keep_scale, TRANSPOSED)
    ds = p * (dp - shift)
    return t.kept(p, terms, row, j0, BN, S, threshold, keep_scale, TRANSPOSED), ds


@triton.jit
def _collect_keys(
    dkeys, dvalues, keys, values, begin, end, dout, q, k, v, dk, dv, lse, delta, dout_at, q_at, k_at, v_at, terms, b, n, n_kv,
    j, j0, first, N, L, S, offset, threshold, scale, keep_scale,
    D: tl.constexpr, BD: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, CAUSAL: tl.constexpr, PRECISION: tl.constexpr,
    BYTES: tl.constexpr, EDGE: tl.constexpr,
):  # fmt: skip
    for i0 in range(begin, end, BM):
        i = i0 + tl.arange(0, BM)
        p, ds = _gradients(
            keys, values, dout, q, k, v, lse, delta, dout_at, q_at, k_at, v_at, terms, b, n, n_kv, i, j, j0,
            N, L, S, offset, threshold, scale, keep_scale, D, BD, BN, CAUSAL, PRECISION, BYTES, EDGE, True,
        )  # fmt: skip
        if dv is not None:
            do = t.tile(dout, dout_at, b, n, i, i < L, first, None, i, D, BD, BYTES)
            dvalues = tl.dot(p.to(do.dtype), do, dvalues, input_precision=PRECISION)
        if dk is not None:
            x = t.tile(q, q_at, b, n, i, i < L, first, terms.rope, i + offset, D, BD, BYTES)
            dkeys = tl.dot((ds * scale).to(x.dtype), x, dkeys, input_precision=PRECISION)
    return dkeys, dvalues


@triton.jit(do_not_specialize=[*t.SIZES, "tiles", "dk_heads"])
def tiled_backward_keys(
    dout, q, k, v, lse, delta, dk, dv, dout_at, q_at, k_at, v_at, terms, tiles, dk_heads, N, L, S, offset, threshold,
    scale, keep_scale, group,
    D: tl.constexpr, BD: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, CAUSAL: tl.constexpr, PRECISION: tl.constexpr,
    BYTES: tl.constexpr,
):  # fmt: skip
    """A program takes BN keys, BD columns of their gradients, and all queries of the group. Shapes as in row_backward."""
    chunks: tl.constexpr = (D + BD - 1) // BD
    program, first = tl.program_id(0) // chunks, tl.program_id(0) % chunks * BD
    heads = N // group
    head, j0 = program // tiles, program % tiles * BN
    b, n_kv = head // heads, head % heads
    j, end = j0 + tl.arange(0, BN), t.end_of_keys(terms, b, S)
    if chunks == 1:
        keys = t.tile(k, k_at, b, n_kv, j, j < end, 0, terms.rope, j, D, BD, BYTES)
        values = t.tile(v, v_at, b, n_kv, j, j < end, 0, None, j, D, BD, BYTES)
    else:
        keys, values = None, None
    dkeys, dvalues = tl.zeros((BN, BD), tl.float32), tl.zeros((BN, BD), tl.float32)
    begin, whole = 0, 0  # the first tile of queries that sees a key of this one, and that sees all
    if CAUSAL:
        begin = tl.minimum(tl.maximum(j0 - offset, 0) // BM * BM, L)
        whole = tl.cdiv(tl.minimum(tl.maximum(j0 + BN - 1 - offset, 0), L), BM) * BM
    whole = tl.where(j0 + BN > end, L, whole)
    begin = tl.where(j0 >= end, L, begin)
    for member in range(group):
        n = n_kv * group + member
        dkeys, dvalues = _collect_keys(
            dkeys, dvalues, keys, values, begin, whole, dout, q, k, v, dk, dv, lse, delta, dout_at, q_at, k_at, v_at, terms,
            b, n, n_kv, j, j0, first, N, L, S, offset, threshold, scale, keep_scale,
            D, BD, BM, BN, CAUSAL, PRECISION, BYTES, True,
        )  # fmt: skip
        dkeys, dvalues = _collect_keys(
            dkeys, dvalues, keys, values, tl.maximum(begin, whole), L, dout, q, k, v, dk, dv, lse, delta, dout_at, q_at, k_at,
            v_at, terms, b, n, n_kv, j, j0, first, N, L, S, offset, threshold, scale, keep_scale,
            D, BD, BM, BN, CAUSAL, PRECISION, BYTES, False,
        )  # fmt: skip
    if dv is not None:
        t.store(dv, dvalues, b, n_kv, j, j < S, dk_heads, S, first, None, j, D, BD)
    if dk is not None:
        t.store(dk, dkeys, b, n_kv, j, j < S, dk_heads, S, first, terms.rope, j, D, BD)


@triton.jit
def _collect_queries(
    dqueries, low, high, x, do, begin, end, dout, q, k, v, dq, drelative, lse, delta, dout_at, q_at, k_at, v_at, terms, b, n,
    n_kv, i, first, N, L, S, offset, threshold, scale, keep_scale,
    D: tl.constexpr, BD: tl.constexpr, BN: tl.constexpr, CAUSAL: tl.constexpr, PRECISION: tl.constexpr, BYTES: tl.constexpr,
    EDGE: tl.constexpr,
):  # fmt: skip
    keys = t.end_of_keys(terms, b, S)
    for j0 in range(begin, end, BN):
        j = j0 + tl.arange(0, BN)
        _, ds = _gradients(
            x, do, dout, q, k, v, lse, delta, dout_at, q_at, k_at, v_at, terms, b, n, n_kv, i, j, j0,
            N, L, S, offset, threshold, scale, keep_scale, D, BD, BN, CAUSAL, PRECISION, BYTES, EDGE, False,
        )  # fmt: skip
        ds *= scale
        if drelative is not None:
            row = t.query_row(b, n, i, N, L)[:, None]
            more = t.store_relative(drelative, ds, row, i[:, None], j[None, :], S, L, offset, terms)
            low, high = low + more[0], high + more[1]
        if dq is not None:
            y = t.tile(k, k_at, b, n_kv, j, j < keys, first, terms.rope, j, D, BD, BYTES)
            dqueries = tl.dot(ds.to(y.dtype), y, dqueries, input_precision=PRECISION)
    return dqueries, low, high


@triton.jit(do_not_specialize=[*t.SIZES, "tiles", "dq_heads"])
def tiled_backward_queries(
    dout, q, k, v, lse, delta, dq, drelative, dout_at, q_at, k_at, v_at, terms, tiles, dq_heads, N, L, S, offset, threshold,
    scale, keep_scale, group,
    D: tl.constexpr, BD: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, CAUSAL: tl.constexpr, PRECISION: tl.constexpr,
    BYTES: tl.constexpr,
):  # fmt: skip
    """A program takes BM queries, and of their gradients BD columns. Shapes as in packed_backward."""
    chunks: tl.constexpr = (D + BD - 1) // BD
    program, first = tl.program_id(0) // chunks, tl.program_id(0) % chunks * BD
    head, step = program // tiles, tiles - 1 - program % tiles
    b, n = head // N, head % N
    i = step * BM + tl.arange(0, BM)
    if chunks == 1:
        x = t.tile(q, q_at, b, n, i, i < L, 0, terms.rope, i + offset, D, BD, BYTES)
        do = t.tile(dout, dout_at, b, n, i, i < L, 0, None, i, D, BD, BYTES)
    else:
        x, do = None, None
    dqueries = tl.zeros((BM, BD), tl.float32)
    low, high = tl.zeros((BM,), tl.float32), tl.zeros((BM,), tl.float32)
    whole, end = key_range(terms, b, step * BM, S, offset, CAUSAL, BM, BN)
    dqueries, low, high = _collect_queries(
        dqueries, low, high, x, do, 0, whole, dout, q, k, v, dq, drelative, lse, delta, dout_at, q_at, k_at, v_at, terms,
        b, n, n // group, i, first, N, L, S, offset, threshold, scale, keep_scale, D, BD, BN, CAUSAL, PRECISION, BYTES, False,
    )  # fmt: skip
    dqueries, low, high = _collect_queries(
        dqueries, low, high, x, do, whole, end, dout, q, k, v, dq, drelative, lse, delta, dout_at, q_at, k_at, v_at, terms,
        b, n, n // group, i, first, N, L, S, offset, threshold, scale, keep_scale, D, BD, BN, CAUSAL, PRECISION, BYTES, True,
    )  # fmt: skip
    if drelative is not None:  # each chunk's program writes the same
        t.store_relative_ends(drelative, low, high, t.query_row(b, n, i, N, L), i < L, terms)
    if dq is not None:
        t.store(dq, dqueries, b, n, i, i < L, dq_heads, L, first, terms.rope, i + offset, D, BD)


@triton.jit(do_not_specialize=[*t.SIZES, "B", "parts"])
def tiled_backward_bias(
    dout, q, k, v, lse, delta, dbias, dout_at, q_at, k_at, v_at, terms, B, parts, N, L, S, offset, threshold, scale,
    keep_scale, group,
    D: tl.constexpr, BD: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, CAUSAL: tl.constexpr, PRECISION: tl.constexpr,
    BYTES: tl.constexpr, SUM_B: tl.constexpr, SUM_N: tl.constexpr, SUM_L: tl.constexpr, SUM_S: tl.constexpr,
):  # fmt: skip
    """A program takes a tile of the bias, and a part of all that its gradient is summed over.

    dbias: (parts, B, N, L, S) fp32, of each dimension 1 where the bias has 1 and it is summed
    """
    tiles_i, tiles_j = tl.cdiv(L, BM), tl.cdiv(S, BN)
    part, place = tl.program_id(0) % parts, tl.program_id(0) // parts
    column, place = _split(place, tiles_j, not SUM_S)
    line, place = _split(place, tiles_i, not SUM_L)
    head, batch = _split(place, N, not SUM_N)
    count = 1
    count *= B if SUM_B else 1
    count *= N if SUM_N else 1
    count *= tiles_i if SUM_L else 1
    count *= tiles_j if SUM_S else 1
    acc = tl.zeros((BM, BN), tl.float32)
    for r in range(count * part // parts, count * (part + 1) // parts):
        tj, rest = _split(r, tiles_j, SUM_S)
        ti, rest = _split(rest, tiles_i, SUM_L)
        tn, tb = _split(rest, N, SUM_N)
        b, n = batch + tb, head + tn
        i, j0 = (line + ti) * BM + tl.arange(0, BM), (column + tj) * BN
        j = j0 + tl.arange(0, BN)
        _, ds = _gradients(
            None, None, dout, q, k, v, lse, delta, dout_at, q_at, k_at, v_at, terms, b, n, n // group, i, j, j0,
            N, L, S, offset, threshold, scale, keep_scale, D, BD, BN, CAUSAL, PRECISION, BYTES, True, False,
        )  # fmt: skip
        acc += ds
    i, j = line * BM + tl.arange(0, BM), column * BN + tl.arange(0, BN)
    rows, columns = 1 if SUM_L else L, 1 if SUM_S else S
    base = ((part * (1 if SUM_B else B) + batch).to(tl.int64) * (1 if SUM_N else N) + head) * rows * columns
    if SUM_L and SUM_S:
        tl.store(dbias + base, tl.sum(tl.sum(acc, 1), 0))
    elif SUM_L:
        tl.store(dbias + base + j, tl.sum(acc, 0), mask=j < S)
    elif SUM_S:
        tl.store(dbias + base + i, tl.sum(acc, 1), mask=i < L)
    else:
        tl.store(dbias + base + i.to(tl.int64)[:, None] * S + j[None, :], acc, mask=(i < L)[:, None] & (j < S)[None, :])


@triton.jit
def _split(index, count, THERE: tl.constexpr):
    """An index into a dimension of `count` and the rest of it, if that dimension is among those indexed."""
    if THERE:
        return index % count, index // count
    else:
        return index * 0, index
