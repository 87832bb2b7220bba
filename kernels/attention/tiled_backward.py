"""Backward of attention of any length, after FlashAttention-2 (Dao, 2023). tiled.py has its cost.

Three kernels: the row sums that the softmax gradient subtracts, then dq, and dk and dv. A fourth,
for the gradient of a bias, is in tiled_bias.py. The program that owns a tile of a gradient loops
over everything that is summed into it. There are no atomics, so the results are the same bits each
time.

The saved log-sum-exp is rounded, by 1e-5 where it is 200, so that the recomputed exponentials
e = exp(logit - lse) of a query do not add up to 1. The probabilities are therefore e / sum(e). The
kernel for dq comes first, because it can do without the sums: dq = sum(e (dp - delta) k) / sum(e).
It adds up e on the way, one addition and one maximum for each logit beside two products of D, and
stores 1 / sum(e), by which the other kernels multiply. Not chosen: a pass of its own, which would
compute the logits once more (2 L S D of 14 L S D FLOPs), and saving the maximum and the sum of the
exponentials in forward instead of lse, which changes what the operator returns on every device.

A query that sees one key has logits without a gradient. dp - delta is not exactly 0 then, since
these are two sums in different orders. The kernel for dq therefore compares sum(e) with max(e).
Where they are equal, all other exponentials together are less than the rounding of the sum, and the
gradients of the logits are set to 0: see `Operands.inverse`.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl
from fusedseq.kernels.attention import tile as t
from fusedseq.kernels.attention.arguments import (
    UNSPECIALIZED_SIZES,
    Config,
    Sizes,
    end_of_keys,
    query_row,
    sequence,
)
from fusedseq.kernels.attention.logits import (
    logits,
    softcap_slope,
    store_relative,
    store_relative_ends,
)
from fusedseq.kernels.attention.probabilities import LOG2E, dropout, exp_of_difference
from fusedseq.kernels.attention.tiled import key_range, product_of_heads, window_range


class Operands(NamedTuple):
    """The inputs that the backward kernels share."""

    dO: Any  # Heads (B, N, L, D)
    Q: Any  # Heads (B, N, L, D)
    K: Any  # Heads (B, N_kv, S, D)
    V: Any  # Heads (B, N_kv, S, D)
    lse: Any  # (B, N, L) fp32, natural units; +inf where a query sees no key
    delta: Any  # (B, N, L) fp32, of `tiled_delta`
    # (B, N, L) fp32, of `tiled_backward_queries`: 1 / sum(e) of each query, with a minus sign where
    # the gradients of its logits are 0; None in that kernel itself.
    inverse: Any


@triton.jit(do_not_specialize=["tiles", "N", "L"])
def tiled_delta(
    dout,  # (B, N, L, D)
    out,  # (B, N, L, D)
    delta,  # (B, N, L) fp32
    dout_strides,  # of the first three dimensions
    out_strides,
    tiles,  # ceil(L / BM)
    N,
    L,
    cu_seqlens,  # (B + 1,) int64 of packed sequences, of which L is the longest; or None
    D: tl.constexpr,
    BD: tl.constexpr,
    BM: tl.constexpr,  # rows of a program
    BYTES: tl.constexpr,  # the other constants: arguments.Config
):
    """Computes delta, the sum of dout * out over each row, which the softmax gradient subtracts.

    A program owns BM rows of a head. Memory bandwidth is the limit.
    """
    C: tl.constexpr = Config(D, BD, BM, BM, False, "ieee", BYTES)
    head = tl.program_id(0) // tiles
    b, n = head // N, head % N
    i = tl.program_id(0) % tiles * BM + tl.arange(0, BM)
    end = L
    if cu_seqlens is not None:
        first = tl.load(cu_seqlens + b)
        end = (tl.load(cu_seqlens + b + 1) - first).to(tl.int32)
        dout, out = dout + first * dout_strides[2], out + first * out_strides[2]
    total = tl.zeros((BM,), tl.float32)
    for d0 in range(0, D, BD):
        do = t.load_tile(t.Heads(dout, dout_strides), b, n, i, i < end, d0, None, i, C)
        o = t.load_tile(t.Heads(out, out_strides), b, n, i, i < end, d0, None, i, C)
        total += tl.sum(do.to(tl.float32) * o.to(tl.float32), 1)
    rows = i < end
    tl.store(delta + ((b.to(tl.int64) * N + n) * L + i), total, mask=rows)


@triton.jit
def logit_gradients(
    resident_logits,  # the resident operand of the logits' product, see product_of_heads
    resident_dp,  # the same of the product dout v^T
    operands,  # Operands
    b,  # batch row
    n,  # head of q
    n_kv,  # head of k and v
    i,  # (BM,) queries
    j,  # (BN,) keys
    j0,  # the first of these
    sizes,  # arguments.Sizes
    optional,  # arguments.OptionalTensors
    EDGE: tl.constexpr,  # whether some keys may be hidden, or queries outside of L
    TRANSPOSED: tl.constexpr,
    C: tl.constexpr,  # arguments.Config
    OF_PRODUCTS: tl.constexpr = True,  # whether softcap's derivative is a factor of the gradient
):
    """Returns a tile of the probabilities after dropout, and of the gradient of the logits; in
    `tiled_backward_queries`, where operands.inverse is None, the exponentials e, and the gradient
    of the logits times their sum.

    Both are (queries, keys), or (keys, queries) if TRANSPOSED.
    """
    columns = j < end_of_keys(optional, b, sizes.S)
    rows = i < sizes.L
    at = b, n, b, n_kv, i, j, rows, columns
    Q, K, offset = operands.Q, operands.K, sizes.offset
    # The rope is passed as it is: an assignment would make tensors of its constants.
    s = product_of_heads(resident_logits, Q, K, *at, optional.rope, offset, TRANSPOSED, C)
    dO, V = operands.dO, operands.V
    dp = product_of_heads(resident_dp, dO, V, *at, None, offset, TRANSPOSED, C)

    # Rows outside of L have a log-sum-exp of +inf, hence exponentials of 0.
    row = query_row(b, n, i, sizes, optional)
    lse = tl.load(operands.lse + row, mask=rows, other=float("inf")) * LOG2E
    delta = tl.load(operands.delta + row, mask=rows, other=0.0)
    slope = None
    if optional.softcap is not None and OF_PRODUCTS:
        if TRANSPOSED:
            slope = softcap_slope(s, b, n, i[None, :], j[:, None], sizes, optional)
        else:
            slope = softcap_slope(s, b, n, i[:, None], j[None, :], sizes, optional)
    if TRANSPOSED:
        query, key = i[None, :], j[:, None]
        s = logits(s, b, n, query, key, sizes, optional, C.CAUSAL, EDGE)
        lse, delta = lse[None, :], delta[None, :]
    else:
        query, key = i[:, None], j[None, :]
        s = logits(s, b, n, query, key, sizes, optional, C.CAUSAL, EDGE)
        lse, delta = lse[:, None], delta[:, None]
    e = exp_of_difference(s, lse)
    dp = dropout(dp, optional, row, j0, C.BN, sizes, TRANSPOSED)
    if slope is not None:
        dp, delta = dp * slope, delta * slope
    if operands.inverse is None:
        return e, e * (dp - delta)
    else:
        inverse = tl.load(operands.inverse + row, mask=rows, other=0.0)
        inverse = inverse[None, :] if TRANSPOSED else inverse[:, None]
        p = e * tl.abs(inverse)
        ds = tl.where(inverse < 0, 0.0, p * (dp - delta))
        return dropout(p, optional, row, j0, C.BN, sizes, TRANSPOSED), ds


@triton.jit
def _add_queries(
    dkeys,  # (BN, BD) fp32
    dvalues,  # (BN, BD) fp32
    keys,  # the loaded tiles of k and v, or None where heads are wider than BD
    values,
    begin,  # first query
    end,  # end of the queries
    b,  # batch row
    n,  # head of q
    n_kv,  # head of k and v
    j,  # (BN,) keys
    j0,  # the first of these
    d0,  # first column of the gradients
    dk,  # None where not needed, as dv
    dv,
    operands,  # Operands
    sizes,  # arguments.Sizes
    optional,  # arguments.OptionalTensors
    EDGE: tl.constexpr,
    C: tl.constexpr,
):
    """Adds what queries begin : end contribute to the gradients of a tile of keys and values.
    Returns both."""
    for i0 in range(begin, end, C.BM):
        i = i0 + tl.arange(0, C.BM)
        at = b, n, n_kv, i, j, j0
        p, ds = logit_gradients(keys, values, operands, *at, sizes, optional, EDGE, True, C)
        if dv is not None:
            do = t.load_tile(operands.dO, b, n, i, i < sizes.L, d0, None, i, C)
            p = t.operand(p, do.dtype, C.BM)
            dvalues = tl.dot(p, do, dvalues, input_precision=C.PRECISION)
        if dk is not None:
            position = i + sizes.offset
            x = t.load_tile(operands.Q, b, n, i, i < sizes.L, d0, optional.rope, position, C)
            ds = t.operand(ds * sizes.scale, x.dtype, C.BM)
            dkeys = tl.dot(ds, x, dkeys, input_precision=C.PRECISION)
    return dkeys, dvalues


@triton.jit(do_not_specialize=[*UNSPECIALIZED_SIZES, "tiles", "dk_heads"])
def tiled_backward_keys(
    dout,  # (B, N, L, D)
    q,  # (B, N, L, D)
    k,  # (B, N_kv, S, D)
    v,  # (B, N_kv, S, D)
    lse,  # (B, N, L) fp32, natural units
    delta,  # (B, N, L) fp32, of tiled_delta
    inverse,  # (B, N, L) fp32, of tiled_backward_queries
    dk,  # (B, N_kv, S, D), stored as (B, S, dk_heads, D); None where not needed
    dv,  # as dk
    dout_strides,  # of the first three dimensions, as the next three
    q_strides,
    k_strides,
    v_strides,
    optional,  # arguments.OptionalTensors
    tiles,  # ceil(S / BN)
    # Heads stored for a position of dk and dv: N_kv, or more in one projection's gradient.
    dk_heads,
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
    BM: tl.constexpr,  # queries of a step
    BN: tl.constexpr,  # keys of a program
    CAUSAL: tl.constexpr,
    PRECISION: tl.constexpr,
    BYTES: tl.constexpr,  # the other constants: arguments.Config
):
    """Computes dk and dv. A program owns BN keys of a head and BD columns of their gradients.

    It loops over the query heads of its group: for each, first the tiles of queries that do not see
    all BN keys, then those that do. The tensor cores are the limit; registers limit the tile sizes.
    """
    C: tl.constexpr = Config(D, BD, BM, BN, CAUSAL, PRECISION, BYTES)
    sizes = Sizes(N, L, S, offset, threshold, scale, keep_scale, group)
    dO, Q = t.Heads(dout, dout_strides), t.Heads(q, q_strides)
    K, V = t.Heads(k, k_strides), t.Heads(v, v_strides)
    operands = Operands(dO, Q, K, V, lse, delta, inverse)

    # The keys of this program.
    chunks: tl.constexpr = (D + BD - 1) // BD
    program, d0 = tl.program_id(0) // chunks, tl.program_id(0) % chunks * BD
    heads = N // group
    head, j0 = program // tiles, program % tiles * BN
    b, n_kv = head // heads, head % heads
    stored = b  # the batch row of the results
    if optional.cu_seqlens_q is not None:
        first_q, first_k, L, S, offset = sequence(optional, b)
        sizes = Sizes(N, L, S, offset, threshold, scale, keep_scale, group)
        dO = t.Heads(dout + first_q * dout_strides[2], dout_strides)
        Q = t.Heads(q + first_q * q_strides[2], q_strides)
        K = t.Heads(k + first_k * k_strides[2], k_strides)
        V = t.Heads(v + first_k * v_strides[2], v_strides)
        operands = Operands(dO, Q, K, V, lse, delta, inverse)
        stored = b * 0
        if dk is not None:
            dk += first_k * dk_heads * D
        if dv is not None:
            dv += first_k * dk_heads * D
    j, end = j0 + tl.arange(0, BN), end_of_keys(optional, b, S)
    if chunks == 1:
        keys = t.load_tile(K, b, n_kv, j, j < end, 0, optional.rope, j, C)
        values = t.load_tile(V, b, n_kv, j, j < end, 0, None, j, C)
    else:
        keys, values = None, None
    dkeys, dvalues = tl.zeros((BN, BD), tl.float32), tl.zeros((BN, BD), tl.float32)

    # Queries before `begin` see none of the keys, queries from `whole` on see all of them.
    begin, whole = 0, 0
    if CAUSAL:
        begin = tl.minimum(tl.maximum(j0 - offset, 0) // BM * BM, L)
        whole = tl.cdiv(tl.minimum(tl.maximum(j0 + BN - 1 - offset, 0), L), BM) * BM
    whole = tl.where(j0 + BN > end, L, whole)
    begin = tl.where(j0 >= end, L, begin)
    last = L
    if optional.window_left is not None:
        first = tl.maximum(j0 - optional.window_right - offset, 0) // BM * BM
        begin = tl.maximum(begin, first)
        last = tl.minimum(L, tl.maximum(j0 + BN + optional.window_left - offset, 0))
    for member in range(group):
        n = n_kv * group + member
        shared = b, n, n_kv, j, j0, d0, dk, dv, operands, sizes
        state = dkeys, dvalues
        if optional.window_left is None:
            state = _add_queries(*state, keys, values, begin, whole, *shared, optional, True, C)
            begin_whole = tl.maximum(begin, whole)
            state = _add_queries(*state, keys, values, begin_whole, L, *shared, optional, False, C)
        else:
            state = _add_queries(*state, keys, values, begin, last, *shared, optional, True, C)
        dkeys, dvalues = state

    if dv is not None:
        t.store_tile(dv, dvalues, stored, n_kv, j, j < S, dk_heads, S, d0, None, j, C)
    if dk is not None:
        t.store_tile(dk, dkeys, stored, n_kv, j, j < S, dk_heads, S, d0, optional.rope, j, C)


@triton.jit
def _add_keys(
    dqueries,  # (BM, BD) fp32, this and all others not yet divided by the sum of exponentials
    low,  # (BM,) fp32, gradient of the relative keys at distance -clip
    high,  # (BM,) fp32, at distance clip
    total,  # (BM,) fp32, the sum of the exponentials
    top,  # (BM,) fp32, their maximum
    queries,  # the loaded tiles of q and dout, or None where heads are wider than BD
    douts,
    begin,  # first key, a multiple of BN
    end,  # end of the keys
    b,  # batch row
    n,  # head of q
    n_kv,  # head of k and v
    i,  # (BM,) queries
    d0,  # first column of the gradient
    dq,  # None where not needed, as drelative
    drelative,
    operands,  # Operands
    sizes,  # arguments.Sizes
    optional,  # arguments.OptionalTensors
    EDGE: tl.constexpr,
    C: tl.constexpr,
):
    """Adds what keys begin : end contribute to the gradients of a tile of queries. Returns
    dqueries, low, high, total and top."""
    keys = end_of_keys(optional, b, sizes.S)
    for j0 in range(begin, end, C.BN):
        j = j0 + tl.arange(0, C.BN)
        at = b, n, n_kv, i, j, j0
        e, ds = logit_gradients(queries, douts, operands, *at, sizes, optional, EDGE, False, C)
        total, top = total + tl.sum(e, 1), tl.maximum(top, tl.max(e, 1))
        ds *= sizes.scale
        if drelative is not None:
            row, query, key = query_row(b, n, i, sizes, optional)[:, None], i[:, None], j[None, :]
            more = store_relative(drelative, ds, row, query, key, sizes, optional)
            low, high = low + more[0], high + more[1]
        if dq is not None:
            y = t.load_tile(operands.K, b, n_kv, j, j < keys, d0, optional.rope, j, C)
            ds = t.operand(ds, y.dtype, C.BN)
            dqueries = tl.dot(ds, y, dqueries, input_precision=C.PRECISION)
    return dqueries, low, high, total, top


@triton.jit(do_not_specialize=[*UNSPECIALIZED_SIZES, "tiles", "dq_heads"])
def tiled_backward_queries(
    dout,  # (B, N, L, D)
    q,  # (B, N, L, D)
    k,  # (B, N_kv, S, D)
    v,  # (B, N_kv, S, D)
    lse,  # (B, N, L) fp32, natural units
    delta,  # (B, N, L) fp32, of tiled_delta
    inverse,  # (B, N, L) fp32, see Operands; written here
    dq,  # (B, N, L, D), stored as (B, L, dq_heads, D); None where not needed
    drelative,  # fp32, in the shape of optional.relative, zeroed by the caller; or None
    dout_strides,  # of the first three dimensions, as the next three
    q_strides,
    k_strides,
    v_strides,
    optional,  # arguments.OptionalTensors
    tiles,  # ceil(L / BM)
    # Heads stored for a position of dq: N, or more where dq is part of one projection's gradient.
    dq_heads,
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
    BM: tl.constexpr,  # queries of a program
    BN: tl.constexpr,  # keys of a step
    CAUSAL: tl.constexpr,
    PRECISION: tl.constexpr,
    BYTES: tl.constexpr,  # the other constants: arguments.Config
):
    """Computes dq, drelative and inverse. A program owns BM queries of a head and BD columns of
    their gradient.

    It loops over the keys as tiled_forward does. The tensor cores are the limit. drelative is not
    yet divided by the sums of the exponentials, which are known only after it was stored: the
    caller multiplies it by max(inverse, 0).
    """
    C: tl.constexpr = Config(D, BD, BM, BN, CAUSAL, PRECISION, BYTES)
    sizes = Sizes(N, L, S, offset, threshold, scale, keep_scale, group)
    dO, Q = t.Heads(dout, dout_strides), t.Heads(q, q_strides)
    K, V = t.Heads(k, k_strides), t.Heads(v, v_strides)
    operands = Operands(dO, Q, K, V, lse, delta, None)

    # The queries of this program; of a causal call those with the most keys come first.
    chunks: tl.constexpr = (D + BD - 1) // BD
    program, d0 = tl.program_id(0) // chunks, tl.program_id(0) % chunks * BD
    head, step = program // tiles, tiles - 1 - program % tiles
    b, n = head // N, head % N
    stored = b  # the batch row of the results
    if optional.cu_seqlens_q is not None:
        first_q, first_k, L, S, offset = sequence(optional, b)
        sizes = Sizes(N, L, S, offset, threshold, scale, keep_scale, group)
        dO = t.Heads(dout + first_q * dout_strides[2], dout_strides)
        Q = t.Heads(q + first_q * q_strides[2], q_strides)
        K = t.Heads(k + first_k * k_strides[2], k_strides)
        V = t.Heads(v + first_k * v_strides[2], v_strides)
        operands = Operands(dO, Q, K, V, lse, delta, None)
        stored = b * 0
        if dq is not None:
            dq += first_q * dq_heads * D
    i = step * BM + tl.arange(0, BM)
    if chunks == 1:
        x = t.load_tile(Q, b, n, i, i < L, 0, optional.rope, i + offset, C)
        do = t.load_tile(dO, b, n, i, i < L, 0, None, i, C)
    else:
        x, do = None, None

    # Tiles of keys that all queries see whole, then those with hidden keys.
    dqueries = tl.zeros((BM, BD), tl.float32)
    low, high = tl.zeros((BM,), tl.float32), tl.zeros((BM,), tl.float32)
    total, top = tl.zeros((BM,), tl.float32), tl.zeros((BM,), tl.float32)
    whole, end = key_range(optional, b, step * BM, sizes, C)
    shared = b, n, n // group, i, d0, dq, drelative, operands, sizes
    state = dqueries, low, high, total, top
    if optional.window_left is None:
        state = _add_keys(*state, x, do, 0, whole, *shared, optional, False, C)
        state = _add_keys(*state, x, do, whole, end, *shared, optional, True, C)
    else:
        begin, end = window_range(optional, end, step * BM, sizes, C)
        state = _add_keys(*state, x, do, begin, end, *shared, optional, True, C)
    dqueries, low, high, total, top = state

    # Normalization, by 0 where a query sees no key or one.
    if optional.sinks is not None:  # a probability without a value
        row = query_row(b, n, i, sizes, optional)
        lse_of_row = tl.load(lse + row, mask=i < L, other=float("inf")) * LOG2E
        total += exp_of_difference(tl.load(optional.sinks + n).to(tl.float32), lse_of_row)
    has_gradient = total != top
    factor = 1.0 / tl.where(total == 0, 1.0, total)
    row = query_row(b, n, i, sizes, optional)
    # The programs of all chunks of a head store the same inverse and drelative.
    tl.store(inverse + row, tl.where(has_gradient, factor, -factor), mask=i < L)
    if drelative is not None:
        store_relative_ends(drelative, low, high, row, i < L, optional)
    if dq is not None:
        rows = i < L
        position = i + offset
        dqueries *= tl.where(has_gradient, factor, 0.0)[:, None]
        t.store_tile(dq, dqueries, stored, n, i, rows, dq_heads, L, d0, optional.rope, position, C)
