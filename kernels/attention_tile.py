"""What the attention kernels share: a tile of q, k or v, the logits of a tile with every option, its softmax and dropout.

A tile of logits is (queries, keys) in 2-D kernels, transposed in some, and (pairs of batch row and head, queries, keys) in the
packed one: so the helpers are given the indices b, n, i, j of batch row, head, query and key, in shapes that
broadcast to the tile's. Logits are in units of log 2, for exp2.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl
from fusedseq.kernels import philox

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)
SIZES = ["N", "L", "S", "offset", "threshold"]  # no kernel is compiled anew for another value of these
HEADS = ["dq_heads", "dk_heads"]  # likewise


class Terms(NamedTuple):
    """The options of a call that are tensors; None for those it has not, which costs nothing then."""

    bias: Any = None  # (B, N, L, S) of strides bias_at, 0 where it is broadcast
    bias_at: Any = None
    mask: Any = None  # as bias, bool
    mask_at: Any = None
    step: Any = None  # of which S and the start of every row of bias and mask are multiples
    key_lengths: Any = None  # (B,) int64
    alibi: Any = None  # (N,)
    relative: Any = None  # (B, N, L, 2 * clip + 1): q_i . relative_keys, of each distance
    clip: Any = None
    rope: Any = None  # (P, D)
    key_rows: Any = None  # (B, S) int64
    seed: Any = None  # (1,) int64


@triton.jit
def last(x):
    """x with a new last dimension."""
    return tl.expand_dims(x, -1)


@triton.jit
def transposed(x):
    """With the last two dimensions exchanged."""
    if len(x.shape) == 2:
        return tl.trans(x)
    else:
        return tl.permute(x, (0, 2, 1))


@triton.jit
def pairs(x):
    """The even and the odd columns."""
    shape: tl.constexpr = x.shape
    if len(shape) == 2:
        return tl.split(tl.reshape(x, (shape[0], shape[1] // 2, 2)))
    else:
        return tl.split(tl.reshape(x, (shape[0], shape[1], shape[2] // 2, 2)))


@triton.jit
def rotated(x, table, sign: tl.constexpr):
    """x (..., D) in fp32 with its pairs of columns turned by the angles of table, back again where sign is -1."""
    a, b = pairs(x)
    cos, sin = pairs(table)
    sin = sin * sign
    shape: tl.constexpr = x.shape
    return tl.reshape(tl.join(a * cos - b * sin, a * sin + b * cos), shape)


@triton.jit
def angles(rope, position, inside, first, D: tl.constexpr, BD: tl.constexpr):
    """Columns first : first + BD of the table's rows `position`."""
    d = first + tl.arange(0, BD)
    at = rope + last(position.to(tl.int64) * D) + d
    return tl.load(at, mask=last(inside) & (d < D), other=0.0).to(tl.float32)


@triton.jit
def tile(x, at, b, n, i, inside, first, rope, position, D: tl.constexpr, BD: tl.constexpr, BYTES: tl.constexpr):
    """Columns first : first + BD of rows i of x, 0 where not inside; rotated if there is a rope.

    at: the strides of b, n and i    BYTES: of which every row's address is a multiple: said of the pointers, for of strides and
    base addresses that are no multiple of 16 bytes Triton knows nothing, and would load 2 bytes at a time
    """
    rows = x + (b.to(tl.int64) * at[0] + n.to(tl.int64) * at[1] + i.to(tl.int64) * at[2])
    if len(rows.shape) == 1:
        rows = tl.multiple_of(rows, BYTES)
    else:
        rows = tl.multiple_of(rows, (BYTES, BYTES))
    d = first + tl.arange(0, BD)
    if D % BD == 0:
        loaded = tl.load(last(rows) + d, mask=last(inside), other=0.0)
    else:
        loaded = tl.load(last(rows) + d, mask=last(inside) & (d < D), other=0.0)
    if rope is not None:
        loaded = rotated(loaded.to(tl.float32), angles(rope, position, inside, first, D, BD), 1).to(loaded.dtype)
    return loaded


@triton.jit
def end_of_keys(terms, b, S):
    """The number of keys that batch row b has. What stands behind them is never loaded: it may be NaN."""
    if terms.key_lengths is None:
        return S
    else:
        return tl.minimum(S, tl.load(terms.key_lengths + b).to(tl.int32))


@triton.jit
def key_batch(terms, b, j, inside, S):
    """The batch row in which the keys of batch row b stand."""
    if terms.key_rows is None:
        return b
    else:
        return tl.load(terms.key_rows + b.to(tl.int64) * S + j, mask=inside, other=0)


@triton.jit
def store(x, value, b, n, i, inside, N, L, first, rope, position, D: tl.constexpr, BD: tl.constexpr):
    """Columns first : first + BD of rows i of x, which lies in memory as (B, L, N, D), or with more heads in a row where N says
    so; rotated back if there is a rope."""
    if rope is not None:
        value = rotated(value, angles(rope, position, inside, first, D, BD), -1)
    d = first + tl.arange(0, BD)
    rows = x + ((b.to(tl.int64) * L + i) * N + n) * D
    if D % BD == 0:
        tl.store(last(rows) + d, value.to(x.dtype.element_ty), mask=last(inside))
    else:
        tl.store(last(rows) + d, value.to(x.dtype.element_ty), mask=last(inside) & (d < D))


@triton.jit
def query_row(b, n, i, N, L):
    """The number of a query among all: its row in lse, in `relative`, and of the dropout's mask."""
    return (b.to(tl.int64) * N + n) * L + i


@triton.jit
def logits(qk, scale, b, n, i, j, N, L, S, offset, terms, CAUSAL: tl.constexpr, EDGE: tl.constexpr):
    """scale q.k + bias of a tile, in units of log 2; -inf where a key is not seen.

    EDGE: whether the tile may have keys that causal or the lengths hide, or rows and columns that are not there
    """
    inside = (i < L) & (j < S)
    position = i + offset
    s = qk * (scale * LOG2E)
    if terms.relative is not None:
        middle = terms.relative + (query_row(b, n, i, N, L) * (2 * terms.clip + 1) + terms.clip)
        distance = tl.minimum(tl.maximum(j - position, -terms.clip), terms.clip)
        s += tl.load(middle + distance, mask=inside, other=0.0).to(tl.float32) * (scale * LOG2E)
    if terms.bias is not None:
        s += option(terms.bias, terms.bias_at, b, n, i, j, L, S, terms.step).to(tl.float32) * LOG2E
    if terms.alibi is not None:
        s -= tl.load(terms.alibi + n).to(tl.float32) * LOG2E * tl.abs(position - j).to(tl.float32)
    if EDGE:
        seen = inside
        if CAUSAL:
            seen = seen & (j <= position)
        if terms.key_lengths is not None:
            seen = seen & (j < tl.load(terms.key_lengths + b))
        s = tl.where(seen, s, float("-inf"))
    if terms.mask is not None:
        seen = option(terms.mask, terms.mask_at, b, n, i, j, L, S, terms.step)
        s = tl.where(seen != 0, s, float("-inf"))
    return s


@triton.jit
def option(x, at, b, n, i, j, L, S, STEP):
    """A tile of the bias or the mask. Triton learns here that S and the address of every row are multiples of STEP numbers."""
    bytes: tl.constexpr = STEP * x.dtype.element_ty.primitive_bitwidth // 8 if x.dtype.element_ty != tl.int1 else STEP
    rows = x + (b.to(tl.int64) * at[0] + n.to(tl.int64) * at[1] + i.to(tl.int64) * at[2])
    if len(rows.shape) == 2:
        rows = tl.multiple_of(rows, (bytes, bytes))
    else:
        rows = tl.multiple_of(rows, (bytes, bytes, bytes))
    return tl.load(rows + j * at[3], mask=(i < L) & (j < S // STEP * STEP), other=0)


@triton.jit
def softmax(s):
    """Over the last dimension: probabilities, and the log-sum-exp in units of 1; a row without any key has 0 and +inf."""
    axis: tl.constexpr = len(s.shape) - 1
    top = tl.max(s, axis)
    top = tl.where(top == float("-inf"), 0.0, top)
    p = tl.math.exp2(s - last(top))
    total = tl.sum(p, axis)
    blind = total == 0
    total = tl.where(blind, 1.0, total)
    return p / last(total), tl.where(blind, float("inf"), (top + tl.math.log2(total)) * LN2)


@triton.jit
def kept(x, terms, row, first, BS: tl.constexpr, S, threshold, keep_scale, TRANSPOSED: tl.constexpr):
    """x after the dropout's mask, if there is one, for keys first : first + BS, first a multiple of 4.

    row: `query_row`, of the shape of x without its keys    TRANSPOSED: x is (keys, queries)
    """
    if terms.seed is None:
        return x
    else:
        block = first // 4 + tl.arange(0, BS // 4)
        seed = tl.load(terms.seed)
        if TRANSPOSED:
            keep = philox.keep_down(seed, (row * tl.cdiv(S, 4))[None, :] + last(block), threshold)
        else:
            keep = philox.keep(seed, last(row * tl.cdiv(S, 4)) + block, threshold)
        return tl.where(keep, x * keep_scale, 0.0)


@triton.jit
def store_relative(grad, ds, row, i, j, S, L, offset, terms):
    """Moves a tile of the logits' gradient to the distances it is of, but for the two ends, where many keys meet.

    grad: as terms.relative, fp32    returns the sums at the ends, of the rows
    """
    clip = terms.clip
    distance = tl.minimum(tl.maximum(j - i - offset, -clip), clip)
    inside = (i < L) & (j < S)
    middle = grad + (row * (2 * clip + 1) + clip)
    tl.store(middle + distance, ds, mask=inside & (distance > -clip) & (distance < clip))
    axis: tl.constexpr = len(ds.shape) - 1
    low = tl.sum(tl.where(inside & (distance == -clip), ds, 0.0), axis)
    high = tl.sum(tl.where(inside & (distance == clip), ds, 0.0), axis)
    return low, high


@triton.jit
def store_relative_ends(grad, low, high, row, inside, terms):
    tl.store(grad + row * (2 * terms.clip + 1), low, mask=inside)
    tl.store(grad + row * (2 * terms.clip + 1) + 2 * terms.clip, high, mask=inside)
