"""Computes the logits of a tile with all options, and stores the gradient of its relative keys.

A tile of logits is (queries, keys) in most kernels, (keys, queries) where a kernel says TRANSPOSED,
and (pairs, queries, keys) in the packed kernels, which compute several pairs of a batch row and a
head at once. The functions therefore receive the indices b, n, i, j of batch row, head, query and
key in shapes that broadcast to the tile's.
"""

import triton
import triton.language as tl
from fusedseq.kernels.attention.arguments import query_row


@triton.jit
def tanh(x):
    """tanh by exp; by its series near 0, where the exponential form cancels."""
    u = x * x
    tail = u * (0.02186949 - u * (0.00886324 - u * 0.00359213))
    small = x * (1 - u * (0.33333333 - u * (0.13333333 - u * (0.05396825 - tail))))
    e = tl.exp(-2 * tl.abs(x))
    large = (1 - e) / (1 + e)
    return tl.where(tl.abs(x) < 0.4, small, tl.where(x < 0, -large, large))


@triton.jit
def softcap_slope(qk, b, n, i, j, sizes, optional):
    """Returns the derivative of softcap at the logits of a tile: 1 - tanh(logit / softcap)^2."""
    y = tanh(with_relative(qk * sizes.scale, b, n, i, j, sizes, optional) / optional.softcap)
    return 1 - y * y


@triton.jit
def logits(qk, b, n, i, j, sizes, optional, CAUSAL: tl.constexpr, EDGE: tl.constexpr):
    """Returns scale qk + bias of a tile; -inf where a key is hidden.

    EDGE: whether the tile may contain keys that `causal` or the key lengths hide, or rows and
    columns outside of L and S. Tiles for which this is false skip these tests.
    """
    inside = (i < sizes.L) & (j < sizes.S)
    position = i + sizes.offset
    s = with_relative(qk * sizes.scale, b, n, i, j, sizes, optional)
    if optional.softcap is not None:
        s = tanh(s / optional.softcap) * optional.softcap
    # Additive terms.
    if optional.bias is not None:
        bias = load_broadcast(optional.bias, optional.bias_strides, b, n, i, j, sizes, optional)
        s += bias.to(tl.float32)
    if optional.alibi is not None:
        slope = tl.load(optional.alibi + n).to(tl.float32)
        s -= slope * tl.abs(position - j).to(tl.float32)
    # Hidden keys.
    if EDGE:
        visible = inside
        if CAUSAL:
            visible = visible & (j <= position)
        if optional.window_left is not None:
            visible = visible & (j >= position - optional.window_left)
            visible = visible & (j <= position + optional.window_right)
        if optional.key_lengths is not None:
            visible = visible & (j < tl.load(optional.key_lengths + b))
        s = tl.where(visible, s, float("-inf"))
    if optional.mask is not None:
        mask = load_broadcast(optional.mask, optional.mask_strides, b, n, i, j, sizes, optional)
        s = tl.where(mask != 0, s, float("-inf"))
    return s


@triton.jit
def with_relative(s, b, n, i, j, sizes, optional):
    """Returns s with the scaled products of the queries with the relative keys (Shaw et al.), which
    were computed before, one for each clipped distance."""
    if optional.relative is None:
        return s
    else:
        inside = (i < sizes.L) & (j < sizes.S)
        row = query_row(b, n, i, sizes, optional)
        middle = optional.relative + (row * (2 * optional.clip + 1) + optional.clip)
        position = i + sizes.offset
        distance = tl.minimum(tl.maximum(j - position, -optional.clip), optional.clip)
        product = tl.load(middle + distance, mask=inside, other=0.0).to(tl.float32)
        return s + product * sizes.scale


@triton.jit
def load_broadcast(x, strides, b, n, i, j, sizes, optional):
    """Returns a tile of the bias or the mask, which may be broadcast.

    S is a run-time number of any value, and so are the strides: the alignment that
    optional.alignment guarantees is stated to the compiler for the row pointers (tl.multiple_of)
    and for S (S // alignment * alignment is S), so that loads are wide.
    """
    ALIGNMENT: tl.constexpr = optional.alignment
    element: tl.constexpr = x.dtype.element_ty
    bytes: tl.constexpr = (
        ALIGNMENT * element.primitive_bitwidth // 8 if element != tl.int1 else ALIGNMENT
    )
    batch_offset = b.to(tl.int64) * strides[0]
    rows = x + (batch_offset + n.to(tl.int64) * strides[1] + i.to(tl.int64) * strides[2])
    if len(rows.shape) == 2:
        rows = tl.multiple_of(rows, (bytes, bytes))
    else:
        rows = tl.multiple_of(rows, (bytes, bytes, bytes))
    inside = (i < sizes.L) & (j < sizes.S // ALIGNMENT * ALIGNMENT)
    return tl.load(rows + j * strides[3], mask=inside, other=0)


@triton.jit
def store_relative(grad, ds, row, i, j, sizes, optional):
    """Stores the gradient ds of a tile of logits at the distance of each pair of a query and a key.

    Distances strictly within +-clip belong to one key each and are stored. At the two ends many
    keys share a distance: their sums over the tile are returned as (low, high), one of each row,
    and `store_relative_ends` stores the totals.

    grad: fp32, in the shape of optional.relative    ds: (..., queries, keys)
    """
    clip = optional.clip
    distance = tl.minimum(tl.maximum(j - i - sizes.offset, -clip), clip)
    inside = (i < sizes.L) & (j < sizes.S)
    middle = grad + (row * (2 * clip + 1) + clip)
    tl.store(middle + distance, ds, mask=inside & (distance > -clip) & (distance < clip))
    axis: tl.constexpr = len(ds.shape) - 1
    low = tl.sum(tl.where(inside & (distance == -clip), ds, 0.0), axis)
    high = tl.sum(tl.where(inside & (distance == clip), ds, 0.0), axis)
    return low, high


@triton.jit
def store_relative_ends(grad, low, high, row, inside, optional):
    """Stores the sums of `store_relative` at the distances -clip and clip of each row."""
    tl.store(grad + row * (2 * optional.clip + 1), low, mask=inside)
    tl.store(grad + row * (2 * optional.clip + 1) + 2 * optional.clip, high, mask=inside)
