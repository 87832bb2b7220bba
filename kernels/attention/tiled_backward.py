"""Backward of attention of any length, after FlashAttention-2 (Dao, 2023). tiled.py has its cost.

Three kernels: the row sums that the softmax gradient subtracts (here), then dq
(tiled_backward_queries.py), and dk and dv (tiled_backward_keys.py). A fourth, for the gradient of a
bias, is in tiled_bias.py. The program that owns a tile of a gradient loops
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
from fusedseq.kernels.attention.arguments import Config, end_of_keys, query_row
from fusedseq.kernels.attention.logits import logits, softcap_slope
from fusedseq.kernels.attention.probabilities import LOG2E, dropout, exp_of_difference
from fusedseq.kernels.attention.tiled import product_of_heads


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
        end = tl.minimum(tl.load(cu_seqlens + b + 1) - first, L).to(tl.int32)
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
