"""Backward of attention of any length: dk and dv. tiled_backward.py has the method."""

import triton
import triton.language as tl
from fusedseq.kernels.attention import tile as t
from fusedseq.kernels.attention.arguments import (
    UNSPECIALIZED_SIZES,
    Config,
    Sizes,
    end_of_keys,
    sequence,
)
from fusedseq.kernels.attention.tiled_backward import Operands, logit_gradients


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
