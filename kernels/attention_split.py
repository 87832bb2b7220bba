"""Attention of few queries to many keys, as in decoding with a cache: the keys go in parts to as many programs, and a second
kernel puts the parts together, in their order (flash-decoding: Dao, Haziza, Massa, Sizov, 2023).

Without it a call has B N programs, each of which reads all of its keys alone. Limited by memory: B 8, N 8, S 4096, D 64 in
bf16 reads 67 MB of keys and values, 15.6 us on an H200 at 4.3 TB/s; the parts are 4 (D + 1) bytes of each query, written and
read. Not timed on a GPU.
"""

import triton
import triton.language as tl
from fusedseq.kernels import attention_tile as t
from fusedseq.kernels.attention_tiled import attend, key_range


@triton.jit(do_not_specialize=[*t.SIZES, "parts"])
def split_forward(
    q, k, v, out, lse, q_at, k_at, v_at, terms, parts, N, L, S, offset, threshold, scale, keep_scale, group,
    D: tl.constexpr, BD: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, CAUSAL: tl.constexpr, PRECISION: tl.constexpr,
    BYTES: tl.constexpr,
):  # fmt: skip
    """A program takes all queries of a head, L <= BM, one part of its keys, and of the result BD columns.

    out: (parts, B, N, L, D) fp32, in memory (parts, B, L, N, D)    lse: (parts, B, N, L) fp32, -inf where no key is seen
    """
    chunks: tl.constexpr = (D + BD - 1) // BD
    program, first = tl.program_id(0) // chunks, tl.program_id(0) % chunks * BD
    head, part = program // parts, program % parts
    heads = tl.num_programs(0) // (chunks * parts)
    b, n = head // N, head % N
    i = tl.arange(0, BM)
    row = t.query_row(b, n, i, N, L)
    if chunks == 1:
        x = t.tile(q, q_at, b, n, i, i < L, 0, terms.rope, i + offset, D, BD, BYTES)
    else:
        x = None
    acc, total = tl.zeros((BM, BD), tl.float32), tl.zeros((BM,), tl.float32)
    top = tl.full((BM,), float("-inf"), tl.float32)
    size = tl.cdiv(tl.cdiv(S, BN), parts) * BN
    begin = part * size
    whole, end = key_range(terms, b, 0, S, offset, CAUSAL, BM, BN)
    end = tl.minimum(end, begin + size)
    whole = tl.minimum(tl.maximum(whole, begin), begin + size)
    acc, top, total = attend(
        acc, top, total, x, begin, whole, q, k, v, q_at, k_at, v_at, terms, b, n, n // group, i, row, first,
        N, L, S, offset, threshold, scale, keep_scale, D, BD, BN, CAUSAL, PRECISION, BYTES, False,
    )  # fmt: skip
    acc, top, total = attend(
        acc, top, total, x, whole, end, q, k, v, q_at, k_at, v_at, terms, b, n, n // group, i, row, first,
        N, L, S, offset, threshold, scale, keep_scale, D, BD, BN, CAUSAL, PRECISION, BYTES, True,
    )  # fmt: skip
    acc = acc / tl.where(total == 0, 1.0, total)[:, None]
    t.store(out, acc, part * (heads // N) + b, n, i, i < L, N, L, first, None, i, D, BD)
    if first == 0:
        tl.store(lse + part.to(tl.int64) * heads * L + row, (top + tl.math.log2(total)) * t.LN2, mask=i < L)


@triton.jit(do_not_specialize=["parts", "N", "L"])
def split_combine(partial, partial_lse, out, lse, parts, N, L, D: tl.constexpr, BD: tl.constexpr, PARTS: tl.constexpr):
    """A program takes a query, and of the result BD columns. partial, partial_lse: `split_forward`'s; PARTS: at least parts"""
    chunks: tl.constexpr = (D + BD - 1) // BD
    query, d = tl.program_id(0) // chunks, tl.program_id(0) % chunks * BD + tl.arange(0, BD)
    queries = (tl.num_programs(0) // chunks).to(tl.int64)
    b, n, i = query // (N * L), query // L % N, query % L
    part = tl.arange(0, PARTS)
    l = tl.load(partial_lse + part * queries + query, mask=part < parts, other=float("-inf"))
    top = tl.max(l, 0)
    weight = tl.math.exp2((l - tl.where(top == float("-inf"), 0.0, top)) * t.LOG2E)
    total = tl.sum(weight, 0)
    blind = total == 0
    total = tl.where(blind, 1.0, total)
    at = ((b.to(tl.int64) * L + i) * N + n) * D + d
    inside = (part < parts)[:, None] & (d < D)[None, :]
    x = tl.load(partial + (part * queries * D)[:, None] + at[None, :], mask=inside, other=0.0)
    y = tl.sum(x * weight[:, None], 0) / total
    tl.store(out + at, y.to(out.dtype.element_ty), mask=d < D)
    if tl.program_id(0) % chunks == 0:
        tl.store(lse + query, tl.where(blind, float("inf"), top + tl.math.log2(total) * t.LN2))
