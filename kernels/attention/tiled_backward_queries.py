"""Backward of attention of any length: dq, the gradient of the relative position embedding, and
the sums of the exponentials. tiled_backward.py has the method.
"""

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
from fusedseq.kernels.attention.logits import store_relative, store_relative_ends
from fusedseq.kernels.attention.probabilities import LOG2E, exp_of_difference
from fusedseq.kernels.attention.tiled import key_range, window_range
from fusedseq.kernels.attention.tiled_backward import Operands, logit_gradients


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
