"""Attention of few queries to many keys, as in decoding with a cache, after flash-decoding (Dao,
Haziza, Massa, Sizov, 2023).

The keys of a head are split into parts, each computed by its own program; a second kernel combines
the parts, in their order.

Without the split a call has B N programs, each of which reads all keys of its head alone. The limit
is memory bandwidth: B 8, N 8, S 4096, D 64 in bf16 reads 67 MB of keys and values, 15.6 us on an
H200 at 4.3 TB/s; a part writes and reads 4 (D + 1) bytes for each query. Timed on
an H200: docs/gpu-kernels.md.
"""

import triton
import triton.language as tl
from fusedseq.kernels.attention import tile as t
from fusedseq.kernels.attention.arguments import UNSPECIALIZED_SIZES, Config, Sizes, query_row
from fusedseq.kernels.attention.probabilities import LN2
from fusedseq.kernels.attention.tiled import attend, key_range


@triton.jit(do_not_specialize=[*UNSPECIALIZED_SIZES, "parts"])
def split_forward(
    q,  # (B, N, L, D)
    k,  # (B, N_kv, S, D)
    v,  # (B, N_kv, S, D)
    out,  # (parts, B, N, L, D) fp32, stored as (parts, B, L, N, D)
    # (2, parts, B, N, L) fp32: the maximum of the logits of a part in units of log 2, -inf where a
    # query sees none of its keys, and the sum of their exponentials
    statistics,
    q_strides,  # of the first three dimensions, as the next two
    k_strides,
    v_strides,
    optional,  # arguments.OptionalTensors
    parts,  # of the keys
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
    BM: tl.constexpr,  # at least L
    BN: tl.constexpr,  # keys of a step
    CAUSAL: tl.constexpr,
    PRECISION: tl.constexpr,
    BYTES: tl.constexpr,  # the other constants: arguments.Config
):
    """Computes attention to one part of the keys. A program owns all queries of a head, one part,
    and BD columns of the result."""
    C: tl.constexpr = Config(D, BD, BM, BN, CAUSAL, PRECISION, BYTES)
    sizes = Sizes(N, L, S, offset, threshold, scale, keep_scale, group)
    Q, K, V = t.Heads(q, q_strides), t.Heads(k, k_strides), t.Heads(v, v_strides)
    chunks: tl.constexpr = (D + BD - 1) // BD
    program, d0 = tl.program_id(0) // chunks, tl.program_id(0) % chunks * BD
    head, part = program // parts, program % parts
    heads = tl.num_programs(0) // (chunks * parts)
    b, n = head // N, head % N
    i = tl.arange(0, BM)
    row = query_row(b, n, i, sizes, optional)
    if chunks == 1:
        x = t.load_tile(Q, b, n, i, i < L, 0, optional.rope, i + offset, C)
    else:
        x = None
    acc, total = tl.zeros((BM, BD), tl.float32), tl.zeros((BM,), tl.float32)
    top = tl.full((BM,), float("-inf"), tl.float32)

    # The part's keys: tiles that all queries see whole, then those with hidden keys.
    size = tl.cdiv(tl.cdiv(S, BN), parts) * BN
    begin = part * size
    whole, end = key_range(optional, b, 0, sizes, C)
    end = tl.minimum(end, begin + size)
    whole = tl.minimum(tl.maximum(whole, begin), begin + size)
    state = acc, top, total
    at = b, n, n // group, i, row, d0
    state = attend(*state, x, begin, whole, Q, K, V, *at, sizes, optional, False, C)
    acc, top, total = attend(*state, x, whole, end, Q, K, V, *at, sizes, optional, True, C)

    # Normalization; without a visible key the result is 0, and a sum of 0 the weight of the part.
    acc = acc / tl.where(total == 0, 1.0, total)[:, None]
    batch = part * (heads // N) + b
    t.store_tile(out, acc, batch, n, i, i < L, N, L, d0, None, i, C)
    if d0 == 0:
        address = statistics + part.to(tl.int64) * heads * L + row
        tl.store(address, top, mask=i < L)
        tl.store(address + parts.to(tl.int64) * heads * L, total, mask=i < L)


@triton.jit(do_not_specialize=["parts", "N", "L"])
def split_combine(
    partial,  # (parts, B, N, L, D) fp32, stored as (parts, B, L, N, D): out of split_forward
    statistics,  # (2, parts, B, N, L) fp32, of split_forward
    out,  # (B, N, L, D), stored as (B, L, N, D)
    lse,  # (B, N, L) fp32, natural units; +inf where a query sees no key
    parts,
    N,
    L,
    D: tl.constexpr,
    BD: tl.constexpr,  # columns of a program
    PARTS: tl.constexpr,  # a power of two, at least parts
):
    """Combines the parts of split_forward, weighted by their sums of exponentials. A program owns a
    query and BD columns of the result.

    A part has its maximum and its sum, because the rounding of a log-sum-exp of 200 would change
    its weight by 1e-5.
    """
    chunks: tl.constexpr = (D + BD - 1) // BD
    query, d = tl.program_id(0) // chunks, tl.program_id(0) % chunks * BD + tl.arange(0, BD)
    queries = (tl.num_programs(0) // chunks).to(tl.int64)
    b, n, i = query // (N * L), query // L % N, query % L

    # The weight of each part: its share of the sum of exponentials.
    part = tl.arange(0, PARTS)
    address = statistics + part * queries + query
    tops = tl.load(address, mask=part < parts, other=float("-inf"))
    totals = tl.load(address + parts * queries, mask=part < parts, other=0.0)
    top = tl.max(tops, 0)
    weight = totals * tl.math.exp2(tops - tl.where(top == float("-inf"), 0.0, top))
    total = tl.sum(weight, 0)
    sees_nothing = total == 0
    total = tl.where(sees_nothing, 1.0, total)

    # The weighted mean of the parts' results.
    offset = ((b.to(tl.int64) * L + i) * N + n) * D + d
    inside = (part < parts)[:, None] & (d < D)[None, :]
    address = partial + (part * queries * D)[:, None] + offset[None, :]
    x = tl.load(address, mask=inside, other=0.0)
    y = tl.sum(x * weight[:, None], 0) / total
    tl.store(out + offset, y.to(out.dtype.element_ty), mask=d < D)
    if tl.program_id(0) % chunks == 0:
        row = lse + query
        total_lse = (top + tl.math.log2(total)) * LN2
        tl.store(row, tl.where(sees_nothing, float("inf"), total_lse))
