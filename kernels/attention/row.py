"""Attention with S <= 128: a program holds all keys of a head, so softmax needs no running maximum;
backward is one pass.

Memory traffic at B 64, L = S = 90, N 8, D 64 in bf16: forward 23.6 MB and 1.06 GFLOP (2.1 of padded
tiles), 5.5 us on an H200 at 4.3 TB/s; backward 41.3 MB, 9.6 us, and 2.7 GFLOP (5.4 padded), 6.8 us
at 788 TFLOP/s: memory bandwidth limits both. Tried: 64 queries per step of backward, which spills
registers. Measured on an H200: 81 us forward and backward, limited by something else than these.
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


@triton.jit(do_not_specialize=[*UNSPECIALIZED_SIZES, "tiles"])
def row_forward(
    q,  # (B, N, L, D)
    k,  # (B, N_kv, S, D)
    v,  # (B, N_kv, S, D)
    out,  # (B, N, L, D), stored as (B, L, N, D)
    lse,  # (B, N, L) fp32, natural units
    q_strides,  # of the first three dimensions, as the next two
    k_strides,
    v_strides,
    optional,  # arguments.OptionalTensors
    tiles,  # ceil(L / BM)
    N,  # this and the next seven: arguments.Sizes
    L,
    S,
    offset,
    threshold,
    scale,
    keep_scale,
    group,
    D: tl.constexpr,
    BD: tl.constexpr,  # at least D
    BM: tl.constexpr,  # queries of a program
    BS: tl.constexpr,  # keys of a program, at least S
    CAUSAL: tl.constexpr,
    PRECISION: tl.constexpr,
    BYTES: tl.constexpr,  # the other constants: arguments.Config
):
    """Computes out and lse. A program owns BM queries of a head and reads all keys; its limit is
    memory bandwidth."""
    C: tl.constexpr = Config(D, BD, BM, BS, CAUSAL, PRECISION, BYTES)
    sizes = Sizes(N, L, S, offset, threshold, scale, keep_scale, group)
    head = tl.program_id(0) // tiles
    b, n = head // N, head % N
    i = tl.program_id(0) % tiles * BM + tl.arange(0, BM)
    j = tl.arange(0, BS)

    # Logits.
    Q, K, V = t.Heads(q, q_strides), t.Heads(k, k_strides), t.Heads(v, v_strides)
    x = t.load_tile(Q, b, n, i, i < L, 0, optional.rope, i + offset, C)
    columns = j < end_of_keys(optional, b, S)
    source = batch_row_of_keys(optional, b, j, columns, S)
    y = t.load_tile(K, source, n // group, j, columns, 0, optional.rope, j, C)
    s = tl.dot(x, tl.trans(y), input_precision=PRECISION)
    s = logits(s, b, n, i[:, None], j[None, :], sizes, optional, CAUSAL, True)

    # Probabilities, and the log-sum-exp that a caller may need.
    p, total = softmax(s)
    row = query_row(b, n, i, sizes, optional)
    tl.store(lse + row, total, mask=i < L)
    p = t.operand(dropout(p, optional, row, 0, BS, sizes, False), v.dtype.element_ty, BS)

    # out = p v.
    y = t.load_tile(V, source, n // group, j, columns, 0, None, j, C)
    o = tl.dot(p, y, input_precision=PRECISION)
    t.store_tile(out, o, b, n, i, i < L, N, L, 0, None, i, C)


@triton.jit(do_not_specialize=[*UNSPECIALIZED_SIZES, *UNSPECIALIZED_HEADS])
def row_backward(
    dout,  # (B, N, L, D)
    q,  # (B, N, L, D)
    k,  # (B, N_kv, S, D)
    v,  # (B, N_kv, S, D)
    dq,  # (B, N, L, D), stored as (B, L, dq_heads, D); None where not needed, as the next four
    dk,  # (B, N_kv, S, D), stored as (B, S, dk_heads, D)
    dv,  # as dk
    dlogits,  # (B, N, L, S) fp32, the gradient of a bias before it is summed to the bias's shape
    drelative,  # fp32, in the shape of optional.relative; zeroed by the caller
    dout_strides,  # of the first three dimensions, as the next three
    q_strides,
    k_strides,
    v_strides,
    optional,  # arguments.OptionalTensors
    # Heads stored for a position of dq: N, or more where dq is part of one projection's gradient.
    dq_heads,
    dk_heads,  # the same of dk and dv: N_kv or more
    N,  # this and the next seven: arguments.Sizes
    L,
    S,
    offset,
    threshold,
    scale,
    keep_scale,
    group,
    D: tl.constexpr,
    BD: tl.constexpr,  # at least D
    BM: tl.constexpr,  # queries of a step
    BS: tl.constexpr,  # keys of a program, at least S
    CAUSAL: tl.constexpr,
    PRECISION: tl.constexpr,
    BYTES: tl.constexpr,  # the other constants: arguments.Config
):
    """Computes all gradients in one pass. A program owns a head of keys, and the queries of its
    group in steps of BM.

    dk and dv accumulate in registers over the steps; every query belongs to one program, which
    stores its dq. No atomics, so results are the same bits each time. The limit is memory
    bandwidth; BM 64 was tried and spills.
    """
    C: tl.constexpr = Config(D, BD, BM, BS, CAUSAL, PRECISION, BYTES)
    sizes = Sizes(N, L, S, offset, threshold, scale, keep_scale, group)
    dO, Q = t.Heads(dout, dout_strides), t.Heads(q, q_strides)
    K, V = t.Heads(k, k_strides), t.Heads(v, v_strides)
    heads = N // group
    b, n_kv = tl.program_id(0) // heads, tl.program_id(0) % heads

    # Keys and values stay in registers or shared memory for the whole program.
    j = tl.arange(0, BS)
    columns = j < end_of_keys(optional, b, S)
    keys = t.load_tile(K, b, n_kv, j, columns, 0, optional.rope, j, C)
    values = t.load_tile(V, b, n_kv, j, columns, 0, None, j, C)
    dkeys = tl.zeros((BS, BD), tl.float32)
    dvalues = tl.zeros((BS, BD), tl.float32)
    tiles = tl.cdiv(L, BM)
    for step in range(group * tiles):
        n, i = n_kv * group + step // tiles, step % tiles * BM + tl.arange(0, BM)

        # Probabilities p, and their gradient dp = dout v^T.
        x = t.load_tile(Q, b, n, i, i < L, 0, optional.rope, i + offset, C)
        do = t.load_tile(dO, b, n, i, i < L, 0, None, i, C)
        s = tl.dot(x, tl.trans(keys), input_precision=PRECISION)
        s = logits(s, b, n, i[:, None], j[None, :], sizes, optional, CAUSAL, True)
        p, _ = softmax(s)
        dp = tl.dot(do, tl.trans(values), input_precision=PRECISION)
        row = query_row(b, n, i, sizes, optional)
        dp = dropout(dp, optional, row, 0, BS, sizes, False)

        # The gradient of the logits, and what follows from it elementwise.
        ds = p * (dp - tl.sum(p * dp, 1)[:, None])
        if dlogits is not None:
            mask = (i < L)[:, None] & (j < S)[None, :]
            tl.store(dlogits + row[:, None] * S + j[None, :], ds, mask=mask)
        if drelative is not None:
            scaled, row_of_tile, query, key = ds * scale, row[:, None], i[:, None], j[None, :]
            low, high = store_relative(drelative, scaled, row_of_tile, query, key, sizes, optional)
            store_relative_ends(drelative, low, high, row, i < L, optional)

        # dv += p^T dout, dk += ds^T q, dq = ds k.
        p = t.operand(dropout(p, optional, row, 0, BS, sizes, False), v.dtype.element_ty, BM)
        ds = t.operand(ds * scale, q.dtype.element_ty, BM if BM < BS else BS)
        if dv is not None:
            dvalues = tl.dot(tl.trans(p), do, dvalues, input_precision=PRECISION)
        if dk is not None:
            dkeys = tl.dot(tl.trans(ds), x, dkeys, input_precision=PRECISION)
        if dq is not None:
            g = tl.dot(ds, keys, input_precision=PRECISION)
            t.store_tile(dq, g, b, n, i, i < L, dq_heads, L, 0, optional.rope, i + offset, C)

    if dv is not None:
        t.store_tile(dv, dvalues, b, n_kv, j, j < S, dk_heads, S, 0, None, j, C)
    if dk is not None:
        t.store_tile(dk, dkeys, b, n_kv, j, j < S, dk_heads, S, 0, optional.rope, j, C)
