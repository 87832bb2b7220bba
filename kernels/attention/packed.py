"""Attention with L, S <= 16: a program, one warp, computes G pairs of a batch row and a head;
backward is one pass.

Memory traffic at B 2048, L = S = 6, N 8, D 32 in bf16: forward 25.2 MB and 2 GFLOP of padded tiles,
5.9 us on an H200 at 4.3 TB/s; backward 44.0 MB, 10.2 us (it reads neither out nor lse). Memory
bandwidth is the limit: compiled for sm_90, a prototype of this layout, a batched product of G 16 x
D tiles, executes 216 warp instructions per pair forward and 375 backward, 3.4 and 6.1 us at the
issue rate of 132 multiprocessors. Tried with the prototype: two-dimensional block-diagonal products
(140 instructions, forward only), no tensor cores (346 to 1000), more warps (1.5 to 4 times as
many). Measured on an H200: 15.7 us forward, 43 forward and backward.
"""

import triton
import triton.language as tl
from fusedseq.kernels.attention import tile as t
from fusedseq.kernels.attention.arguments import (
    UNSPECIALIZED_HEADS,
    UNSPECIALIZED_SIZES,
    Config,
    Sizes,
    batch_row_of_keys,
    end_of_keys,
    query_row,
)
from fusedseq.kernels.attention.logits import logits, store_relative, store_relative_ends
from fusedseq.kernels.attention.probabilities import dropout, softmax

# The smallest size of tl.dot on tensor cores. Queries and keys are padded to it.
TILE = tl.constexpr(16)


@triton.jit
def _pairs_of_program(count, N, G: tl.constexpr):
    """Returns batch row and head of the G pairs of this program, (G, 1) each, and whether each pair
    exists.

    Pairs beyond the last one repeat it, so that their loads are valid; nothing is stored for them.
    """
    pair = tl.program_id(0) * G + tl.arange(0, G)[:, None]
    exists = pair < count
    pair = tl.minimum(pair, count - 1)
    return pair // N, pair % N, exists


@triton.jit
def _logits(Q, K, b, n, sizes, optional, G: tl.constexpr, C: tl.constexpr):
    """Returns the logits of G pairs, (G, TILE, TILE); -inf where a query does not see a key.

    Q, K: Heads    b, n: (G, 1)
    """
    i = tl.arange(0, TILE)[None, :]
    j = tl.arange(0, TILE)[None, :]
    columns = j < end_of_keys(optional, b, sizes.S)
    source = batch_row_of_keys(optional, b, j, columns, sizes.S)
    qk = tl.zeros((G, TILE, TILE), tl.float32)
    for d0 in range(0, C.D, C.BD):
        x = t.load_tile(Q, b, n, i, i < sizes.L, d0, optional.rope, i + sizes.offset, C)
        y = t.load_tile(K, source, n // sizes.group, j, columns, d0, optional.rope, j, C)
        qk = tl.dot(x, t.transposed(y), qk, input_precision=C.PRECISION)
    query = tl.arange(0, TILE)[None, :, None]
    key = tl.arange(0, TILE)[None, None, :]
    b, n = b[:, :, None], n[:, :, None]
    return logits(qk, b, n, query, key, sizes, optional, C.CAUSAL, True)


@triton.jit(do_not_specialize=[*UNSPECIALIZED_SIZES, "count"])
def packed_forward(
    q,  # (B, N, L, D)
    k,  # (B, N_kv, S, D)
    v,  # (B, N_kv, S, D)
    out,  # (B, N, L, D), stored as (B, L, N, D)
    lse,  # (B, N, L) fp32, natural units
    q_strides,  # of the first three dimensions, as the next two
    k_strides,
    v_strides,
    optional,  # arguments.OptionalTensors
    count,  # B N, pairs of a batch row and a head
    N,  # this and the next seven: arguments.Sizes
    L,
    S,
    offset,
    threshold,
    scale,
    keep_scale,
    group,
    D: tl.constexpr,
    BD: tl.constexpr,
    G: tl.constexpr,  # pairs of a program
    CAUSAL: tl.constexpr,
    PRECISION: tl.constexpr,
    BYTES: tl.constexpr,  # the other constants: arguments.Config
):
    """Computes out and lse. A program owns all queries and keys of G pairs; its limit is memory
    bandwidth.

    All logits of a pair fit in one tile, so that softmax needs no running maximum. See the top of
    the file for what was tried.
    """
    C: tl.constexpr = Config(D, BD, TILE, TILE, CAUSAL, PRECISION, BYTES)
    sizes = Sizes(N, L, S, offset, threshold, scale, keep_scale, group)
    b, n, exists = _pairs_of_program(count, N, G)
    i = tl.arange(0, TILE)[None, :]
    j = tl.arange(0, TILE)[None, :]
    rows = exists & (i < L)

    # Probabilities, and the log-sum-exp that a caller may need.
    s = _logits(t.Heads(q, q_strides), t.Heads(k, k_strides), b, n, sizes, optional, G, C)
    p, total = softmax(s)
    row = query_row(b, n, i, sizes, optional)
    tl.store(lse + row, total, mask=rows)
    p = t.operand(dropout(p, optional, row, 0, TILE, sizes, False), v.dtype.element_ty, TILE)

    # out = p v, one chunk of the head's columns at a time.
    V = t.Heads(v, v_strides)
    columns = j < end_of_keys(optional, b, S)
    source = batch_row_of_keys(optional, b, j, columns, S)
    for d0 in range(0, D, BD):
        y = t.load_tile(V, source, n // group, j, columns, d0, None, j, C)
        o = tl.dot(p, y, input_precision=PRECISION)
        t.store_tile(out, o, b, n, i, rows, N, L, d0, None, i, C)


@triton.jit(do_not_specialize=[*UNSPECIALIZED_SIZES, *UNSPECIALIZED_HEADS, "count"])
def packed_backward(
    dout,  # (B, N, L, D)
    q,  # (B, N, L, D)
    k,  # (B, N_kv, S, D)
    v,  # (B, N_kv, S, D)
    dq,  # (B, N, L, D), stored as (B, L, dq_heads, D); None where not needed, as the next four
    dk,  # (B, N, S, D), of each query head, stored as (B, S, dk_heads, D)
    dv,  # as dk
    dlogits,  # (B, N, L, S) fp32, the gradient of a bias before it is summed to the bias's shape
    drelative,  # fp32, in the shape of optional.relative; zeroed by the caller
    dout_strides,  # of the first three dimensions, as the next three
    q_strides,
    k_strides,
    v_strides,
    optional,  # arguments.OptionalTensors
    count,  # B N, pairs of a batch row and a head
    # Heads stored for a position of dq: N, or more where dq is part of one projection's gradient.
    dq_heads,
    dk_heads,  # the same of dk and dv
    N,  # this and the next seven: arguments.Sizes
    L,
    S,
    offset,
    threshold,
    scale,
    keep_scale,
    group,
    D: tl.constexpr,
    BD: tl.constexpr,
    G: tl.constexpr,  # pairs of a program
    CAUSAL: tl.constexpr,
    PRECISION: tl.constexpr,
    BYTES: tl.constexpr,  # the other constants: arguments.Config
):
    """Computes all gradients in one pass. A program owns all queries and keys of G pairs; its limit
    is memory bandwidth.

    The probabilities are recomputed from q and k, and the softmax gradient's row sums from p and
    dp, so that neither lse nor out is read.
    """
    C: tl.constexpr = Config(D, BD, TILE, TILE, CAUSAL, PRECISION, BYTES)
    sizes = Sizes(N, L, S, offset, threshold, scale, keep_scale, group)
    dO, Q = t.Heads(dout, dout_strides), t.Heads(q, q_strides)
    K, V = t.Heads(k, k_strides), t.Heads(v, v_strides)
    b, n, exists = _pairs_of_program(count, N, G)
    i = tl.arange(0, TILE)[None, :]
    j = tl.arange(0, TILE)[None, :]
    rows, columns = i < L, j < end_of_keys(optional, b, S)

    # Probabilities p, and their gradient dp = dout v^T.
    s = _logits(Q, K, b, n, sizes, optional, G, C)
    p, _ = softmax(s)
    dp = tl.zeros((G, TILE, TILE), tl.float32)
    for d0 in range(0, D, BD):
        do = t.load_tile(dO, b, n, i, rows, d0, None, i, C)
        y = t.load_tile(V, b, n // group, j, columns, d0, None, j, C)
        dp = tl.dot(do, t.transposed(y), dp, input_precision=PRECISION)
    row = query_row(b, n, i, sizes, optional)
    dp = dropout(dp, optional, row, 0, TILE, sizes, False)

    # The gradient of the logits, and what follows from it elementwise.
    ds = p * (dp - t.add_last_dimension(tl.sum(p * dp, 2)))
    query = tl.arange(0, TILE)[None, :, None]
    key = tl.arange(0, TILE)[None, None, :]
    if dlogits is not None:
        mask = t.add_last_dimension(exists & rows) & (key < S)
        tl.store(dlogits + t.add_last_dimension(row) * S + key, ds, mask=mask)
    if drelative is not None:
        scaled = ds * scale
        row_of_tile = t.add_last_dimension(row)
        low, high = store_relative(drelative, scaled, row_of_tile, query, key, sizes, optional)
        store_relative_ends(drelative, low, high, row, rows, optional)

    # dv = p^T dout, dk = ds^T q, dq = ds k, one chunk of the head's columns at a time.
    p = t.operand(dropout(p, optional, row, 0, TILE, sizes, False), v.dtype.element_ty, TILE)
    ds = t.operand(ds * scale, q.dtype.element_ty, TILE)
    for d0 in range(0, D, BD):
        do = t.load_tile(dO, b, n, i, rows, d0, None, i, C)
        x = t.load_tile(Q, b, n, i, rows, d0, optional.rope, i + offset, C)
        y = t.load_tile(K, b, n // group, j, columns, d0, optional.rope, j, C)
        if dv is not None:
            g = tl.dot(t.transposed(p), do, input_precision=PRECISION)
            t.store_tile(dv, g, b, n, j, exists & (j < S), dk_heads, S, d0, None, j, C)
        if dk is not None:
            g = tl.dot(t.transposed(ds), x, input_precision=PRECISION)
            t.store_tile(dk, g, b, n, j, exists & (j < S), dk_heads, S, d0, optional.rope, j, C)
        if dq is not None:
            g = tl.dot(ds, y, input_precision=PRECISION)
            queries = exists & rows
            t.store_tile(dq, g, b, n, i, queries, dq_heads, L, d0, optional.rope, i + offset, C)
