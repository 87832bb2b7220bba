"""Forward of attention of any length: tiles of keys with a running softmax, after FlashAttention-2
(Dao, 2023).

FLOPs of B N heads: 4 L S D forward, 10 L S D backward (14 here: the kernels of tiled_backward.py
for dk, dv and for dq both compute the logits and their gradient), half of it where causal. Memory
traffic, 2 (2 L + 2 S) D bytes forward in 16 bits, is the limit only below L of about 300. B 4, N
16, L = S = 4096, D 128 in bf16: 0.55 TFLOP, 0.70 ms on an H200 at 788 TFLOP/s; backward 1.92 TFLOP,
2.4 ms. Published Triton kernels of this design reach 330 to 480 TFLOP/s forward. The limits are the
tensor cores, then exp2.

Heads wider than a tile are processed in chunks: a program computes the whole logits, and BD columns
of the result. Decoding (L <= 4) with long caches: see split.py. On an H200 290 TFLOP/s, D 64.

Keys and values may come by tensor descriptors in place of pointers (DESCRIBED_LOADS), and then
warps of their own may load them (SPECIALIZED_LOADS). Triton 3.7.1 compiles both for sm_100. For
sm_90 it ignores the second with 8 warps, and fails with 4 ("PassManager::run failed", in
NVGPUWarpSpecialization); for sm_120 it fails (in NVWSInsertAref). They are no default:
calls of L 512 took longer with descriptors on an H200, with the time in Python. A table of measured
tiles may choose them, see plan.py.
"""

import triton
import triton.language as tl
from fusedseq.kernels.attention import tile as t
from fusedseq.kernels.attention.arguments import (
    UNSPECIALIZED_SIZES,
    Config,
    Sizes,
    batch_row_of_keys,
    end_of_keys,
    query_row,
    sequence,
)
from fusedseq.kernels.attention.logits import logits
from fusedseq.kernels.attention.probabilities import LN2, LOG2E, dropout, exp_of_difference


@triton.jit
def product_of_heads(
    resident,  # the loaded operand that no other tile replaces (X, or Y if TRANSPOSED); or None
    X,  # Heads of the queries' side: q or dout
    Y,  # Heads of the keys' side: k or v
    b,  # batch row of X
    n,  # head of X
    source,  # batch row of Y
    n_kv,  # head of Y
    i,  # rows of X
    j,  # rows of Y
    rows,  # rows of X that exist
    columns,  # rows of Y that exist
    rope,  # rotates both, or None
    offset,  # position of row 0 of X
    TRANSPOSED: tl.constexpr,
    C: tl.constexpr,  # arguments.Config
):
    """Returns the tile x y^T of products over D, or y x^T if TRANSPOSED.

    A head that fits in one chunk is loaded once per program where it does not change between tiles
    (`resident`). A wider head is loaded chunk by chunk in every call.
    """
    if resident is None:
        product = tl.zeros(
            (j.shape[0], i.shape[0]) if TRANSPOSED else (i.shape[0], j.shape[0]), tl.float32
        )
        for d0 in range(0, C.D, C.BD):
            x = t.load_tile(X, b, n, i, rows, d0, rope, i + offset, C)
            y = t.load_tile(Y, source, n_kv, j, columns, d0, rope, j, C)
            if TRANSPOSED:
                product = tl.dot(y, tl.trans(x), product, input_precision=C.PRECISION)
            else:
                product = tl.dot(x, tl.trans(y), product, input_precision=C.PRECISION)
        return product
    elif TRANSPOSED:
        x = t.load_tile(X, b, n, i, rows, 0, rope, i + offset, C)
        return tl.dot(resident, tl.trans(x), input_precision=C.PRECISION)
    else:
        y = t.load_tile(Y, source, n_kv, j, columns, 0, rope, j, C)
        return tl.dot(resident, tl.trans(y), input_precision=C.PRECISION)


@triton.jit
def product_with_described_keys(
    resident,  # as the other parameters, as of product_of_heads
    X,
    Y,  # Heads with a descriptor
    b,
    n,
    n_kv,
    i,
    j0,  # the first row of Y
    rows,
    C: tl.constexpr,
):
    """Returns the tile x y^T of products over D of the rows i of X and j0 : j0 + BN of Y."""
    if resident is None:
        product = tl.zeros((C.BM, C.BN), tl.float32)
        for d0 in range(0, C.D, C.BD):
            x = t.load_tile(X, b, n, i, rows, d0, None, i, C)
            y = t.load_described(Y, b, n_kv, j0, d0, C)
            product = tl.dot(x, tl.trans(y), product)
        return product
    else:
        return tl.dot(resident, tl.trans(t.load_described(Y, b, n_kv, j0, 0, C)))


@triton.jit
def key_range(optional, b, i0, sizes, C: tl.constexpr):
    """Returns (whole, end): queries i0 : i0 + C.BM see every key before `whole`, a multiple of
    C.BN, and none from `end` on.

    Tiles of keys before `whole` need no test for hidden keys.
    """
    whole = end_of_keys(optional, b, sizes.S)
    end = whole
    if C.CAUSAL:
        whole = tl.minimum(whole, i0 + sizes.offset + 1)
        end = tl.minimum(end, i0 + sizes.offset + C.BM)
    return tl.maximum(whole, 0) // C.BN * C.BN, tl.maximum(end, 0)


@triton.jit
def window_range(optional, end, i0, sizes, C: tl.constexpr):
    """Returns (begin, end) for key_range's end and a window: queries i0 : i0 + C.BM see no key
    before `begin`, a multiple of C.BN, and none from `end` on."""
    position = i0 + sizes.offset
    begin = tl.maximum(position - optional.window_left, 0) // C.BN * C.BN
    return begin, tl.minimum(end, position + C.BM + optional.window_right)


@triton.jit
def attend(
    acc,  # (BM, BD) fp32, the unnormalized result
    top,  # (BM,) running maximum of the logits, in units of log 2
    total,  # (BM,) running sum of the exponentials of logit - top
    resident,  # the loaded tile of queries, or None where the head is wider than BD
    begin,  # first key, a multiple of C.BN
    end,  # end of the keys
    Q,  # Heads, as the next two
    K,
    V,
    b,  # batch row
    n,  # head of q
    n_kv,  # head of k and v
    i,  # (BM,) queries
    row,  # (BM,) query_row of these
    d0,  # first column of the result
    sizes,  # arguments.Sizes
    optional,  # arguments.OptionalTensors
    EDGE: tl.constexpr,  # whether some keys may be hidden
    C: tl.constexpr,  # arguments.Config
):
    """Adds the keys begin : end to a running softmax. Returns acc, top and total."""
    keys = end_of_keys(optional, b, sizes.S)
    for j0 in tl.range(begin, end, C.BN, warp_specialize=C.SPECIALIZED):
        j = j0 + tl.arange(0, C.BN)
        source = batch_row_of_keys(optional, b, j, j < keys, sizes.S)
        if K.strides is None:
            s = product_with_described_keys(resident, Q, K, b, n, n_kv, i, j0, i < sizes.L, C)
        else:
            at = b, n, source, n_kv, i, j, i < sizes.L, j < keys
            s = product_of_heads(resident, Q, K, *at, optional.rope, sizes.offset, False, C)
        s = logits(s, b, n, i[:, None], j[None, :], sizes, optional, C.CAUSAL, EDGE)

        # Rescale what was accumulated to the new maximum; a row that has seen no key yet has a
        # maximum of -inf.
        new_top = tl.maximum(top, tl.max(s, 1) * LOG2E)
        shift = tl.where(new_top == float("-inf"), 0.0, new_top)
        p = exp_of_difference(s, shift[:, None])
        shrink = tl.math.exp2(top - shift)
        total = total * shrink + tl.sum(p, 1)

        # Dropout acts on the probabilities but not on their sum.
        p = dropout(p, optional, row, j0, C.BN, sizes, False)
        p = t.operand(p, Q.pointer.dtype.element_ty, C.BN)
        if V.strides is None:
            y = t.load_described(V, b, n_kv, j0, d0, C)
        else:
            y = t.load_tile(V, source, n_kv, j, j < keys, d0, None, j, C)
        acc = tl.dot(p, y, acc * shrink[:, None], input_precision=C.PRECISION)
        top = new_top
    return acc, top, total


@triton.jit(do_not_specialize=[*UNSPECIALIZED_SIZES, "tiles"])
def tiled_forward(
    q,  # (B, N, L, D)
    k,  # (B, N_kv, S, D), or a descriptor of it, as the next one
    v,  # (B, N_kv, S, D)
    out,  # (B, N, L, D), stored as (B, L, N, D)
    lse,  # (B, N, L) fp32, natural units
    q_strides,  # of the first three dimensions, as the next two; these are None for descriptors
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
    BD: tl.constexpr,
    BM: tl.constexpr,  # queries of a program
    BN: tl.constexpr,  # keys of a step
    CAUSAL: tl.constexpr,
    PRECISION: tl.constexpr,
    BYTES: tl.constexpr,
    SPECIALIZED: tl.constexpr,  # the other constants: arguments.Config
):
    """Computes out and lse. A program owns BM queries of a head, and BD columns of their result.

    The keys are traversed in two loops: tiles that all queries see whole, without tests, then those
    with hidden keys. The limit is the tensor cores for long sequences and memory bandwidth for
    short ones.
    """
    C: tl.constexpr = Config(D, BD, BM, BN, CAUSAL, PRECISION, BYTES, SPECIALIZED)
    sizes = Sizes(N, L, S, offset, threshold, scale, keep_scale, group)
    Q, K, V = t.Heads(q, q_strides), t.Heads(k, k_strides), t.Heads(v, v_strides)

    # Of a causal call the queries with the most keys come first, so that the last programs are
    # short.
    chunks: tl.constexpr = (D + BD - 1) // BD
    program, d0 = tl.program_id(0) // chunks, tl.program_id(0) % chunks * BD
    head, step = program // tiles, tiles - 1 - program % tiles
    b, n = head // N, head % N
    stored = b  # the batch row of the results
    if optional.cu_seqlens_q is not None:
        first_q, first_k, L, S, offset = sequence(optional, b)
        sizes = Sizes(N, L, S, offset, threshold, scale, keep_scale, group)
        Q = t.Heads(q + first_q * q_strides[2], q_strides)
        K = t.Heads(k + first_k * k_strides[2], k_strides)
        V = t.Heads(v + first_k * v_strides[2], v_strides)
        out, stored = out + first_q * N * D, b * 0
    i = step * BM + tl.arange(0, BM)
    row = query_row(b, n, i, sizes, optional)
    if chunks == 1:
        x = t.load_tile(Q, b, n, i, i < L, 0, optional.rope, i + offset, C)
    else:
        x = None

    # The running softmax.
    acc, total = tl.zeros((BM, BD), tl.float32), tl.zeros((BM,), tl.float32)
    top = tl.full((BM,), float("-inf"), tl.float32)
    whole, end = key_range(optional, b, step * BM, sizes, C)
    state = acc, top, total
    at = b, n, n // group, i, row, d0
    if optional.window_left is None:
        state = attend(*state, x, 0, whole, Q, K, V, *at, sizes, optional, False, C)
        acc, top, total = attend(*state, x, whole, end, Q, K, V, *at, sizes, optional, True, C)
    else:
        begin, end = window_range(optional, end, step * BM, sizes, C)
        acc, top, total = attend(*state, x, begin, end, Q, K, V, *at, sizes, optional, True, C)

    # Normalization; a query that sees no key has result 0 and a log-sum-exp of +inf.
    sees_nothing = total == 0
    if optional.sinks is not None:
        sink = tl.load(optional.sinks + n).to(tl.float32) * LOG2E
        new_top = tl.maximum(top, sink)
        shift = tl.where(new_top == float("-inf"), 0.0, new_top)
        shrink = tl.math.exp2(top - shift)
        total, acc = total * shrink + tl.math.exp2(sink - shift), acc * shrink[:, None]
        top = new_top
    total = tl.where(sees_nothing, 1.0, total)
    acc = acc / total[:, None]
    t.store_tile(out, acc, stored, n, i, i < L, N, L, d0, None, i, C)
    if d0 == 0:
        total = tl.where(sees_nothing, float("inf"), (top + tl.math.log2(total)) * LN2)
        tl.store(lse + row, total, mask=i < L)
