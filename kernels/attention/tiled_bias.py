"""The gradient of a bias that tiled attention adds to its logits."""

import triton
import triton.language as tl
from fusedseq.kernels.attention import tile as t
from fusedseq.kernels.attention.arguments import UNSPECIALIZED_SIZES, Config, Sizes, sequence
from fusedseq.kernels.attention.tiled_backward import Operands, logit_gradients


@triton.jit(do_not_specialize=[*UNSPECIALIZED_SIZES, "B", "parts"])
def tiled_backward_bias(
    dout,  # (B, N, L, D)
    q,  # (B, N, L, D)
    k,  # (B, N_kv, S, D)
    v,  # (B, N_kv, S, D)
    lse,  # (B, N, L) fp32, natural units
    delta,  # (B, N, L) fp32, of tiled_delta
    inverse,  # (B, N, L) fp32, of tiled_backward_queries
    dbias,  # (parts, B, N, L, S) fp32, with 1 in place of each dimension that is summed
    dout_strides,  # of the first three dimensions, as the next three
    q_strides,
    k_strides,
    v_strides,
    optional,  # arguments.OptionalTensors
    B,
    parts,  # programs that share the sum of a tile of the bias
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
    BM: tl.constexpr,  # queries of a tile
    BN: tl.constexpr,  # keys of a tile
    CAUSAL: tl.constexpr,
    PRECISION: tl.constexpr,
    BYTES: tl.constexpr,  # the other constants: arguments.Config
    SUM_B: tl.constexpr,  # whether the gradient is summed over B, as the next three
    SUM_N: tl.constexpr,
    SUM_L: tl.constexpr,
    SUM_S: tl.constexpr,
):
    """Computes the gradient of a bias. A program owns a tile of the bias, and a part of the tiles
    that are summed into it.

    The caller adds the parts, in order. The logits' gradient is computed a third time here, so that
    no (B, N, L, S) tensor exists.
    """
    C: tl.constexpr = Config(D, BD, BM, BN, CAUSAL, PRECISION, BYTES)
    sizes = Sizes(N, L, S, offset, threshold, scale, keep_scale, group)
    dO, Q = t.Heads(dout, dout_strides), t.Heads(q, q_strides)
    K, V = t.Heads(k, k_strides), t.Heads(v, v_strides)
    operands = Operands(dO, Q, K, V, lse, delta, inverse)

    # The tile of the bias: an index in each dimension that is not summed.
    tiles_i, tiles_j = tl.cdiv(L, BM), tl.cdiv(S, BN)
    part, place = tl.program_id(0) % parts, tl.program_id(0) // parts
    tile_column, place = _split_index(place, tiles_j, not SUM_S)
    tile_row, place = _split_index(place, tiles_i, not SUM_L)
    head, batch = _split_index(place, N, not SUM_N)

    # The number of tiles that are summed into it.
    count = 1
    count *= B if SUM_B else 1
    count *= N if SUM_N else 1
    count *= tiles_i if SUM_L else 1
    count *= tiles_j if SUM_S else 1
    acc = tl.zeros((BM, BN), tl.float32)
    for r in range(count * part // parts, count * (part + 1) // parts):
        # An index in each dimension that is summed.
        tj, rest = _split_index(r, tiles_j, SUM_S)
        ti, rest = _split_index(rest, tiles_i, SUM_L)
        tn, tb = _split_index(rest, N, SUM_N)
        b, n = batch + tb, head + tn
        i, j0 = (tile_row + ti) * BM + tl.arange(0, BM), (tile_column + tj) * BN
        j = j0 + tl.arange(0, BN)
        at = b, n, n // group, i, j, j0
        if optional.cu_seqlens_q is None:
            _, ds = logit_gradients(
                None, None, operands, *at, sizes, optional, True, False, C, False
            )
        else:
            first_q, first_k, rows, columns, start = sequence(optional, b)
            own = Sizes(N, rows, columns, start, threshold, scale, keep_scale, group)
            shifted = Operands(
                t.Heads(dout + first_q * dout_strides[2], dout_strides),
                t.Heads(q + first_q * q_strides[2], q_strides),
                t.Heads(k + first_k * k_strides[2], k_strides),
                t.Heads(v + first_k * v_strides[2], v_strides),
                lse,
                delta,
                inverse,
            )
            _, ds = logit_gradients(None, None, shifted, *at, own, optional, True, False, C, False)
        acc += ds

    # The dimensions within a tile that are summed are summed last.
    i, j = tile_row * BM + tl.arange(0, BM), tile_column * BN + tl.arange(0, BN)
    rows, columns = 1 if SUM_L else L, 1 if SUM_S else S
    plane = (part * (1 if SUM_B else B) + batch).to(tl.int64) * (1 if SUM_N else N) + head
    base = plane * rows * columns
    if SUM_L and SUM_S:
        tl.store(dbias + base, tl.sum(tl.sum(acc, 1), 0))
    elif SUM_L:
        tl.store(dbias + base + j, tl.sum(acc, 0), mask=j < S)
    elif SUM_S:
        tl.store(dbias + base + i, tl.sum(acc, 1), mask=i < L)
    else:
        mask = (i < L)[:, None] & (j < S)[None, :]
        tl.store(dbias + base + i.to(tl.int64)[:, None] * S + j[None, :], acc, mask=mask)


@triton.jit
def _split_index(index, count, PRESENT: tl.constexpr):
    """Returns the index of a dimension of `count` and the remaining index; (0, index) if the
    dimension is not PRESENT."""
    if PRESENT:
        return index % count, index // count
    else:
        return index * 0, index
