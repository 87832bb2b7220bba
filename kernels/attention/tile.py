"""Device functions of the attention kernels: loads and stores of tiles, logits, softmax, dropout.

A tile of logits is (queries, keys) in most kernels, (keys, queries) where a kernel says TRANSPOSED,
and (pairs, queries, keys) in the packed kernels, which compute several pairs of a batch row and a
head at once. The functions therefore receive the indices b, n, i, j of batch row, head, query and
key in shapes that broadcast to the tile's.

The exponential of a logit is exp2, which is one instruction, of a fused multiply-add: see
`exp_of_difference`.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl
from fusedseq.kernels import philox

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)
COMPILED = tl.constexpr(not triton.knobs.runtime.interpret)
# Kernel parameters for which Triton compiles one kernel for every value (do_not_specialize).
UNSPECIALIZED_SIZES = ["N", "L", "S", "offset", "threshold"]
UNSPECIALIZED_HEADS = ["dq_heads", "dk_heads"]


class Rope(NamedTuple):
    """A rotary position embedding of queries and keys.

    Without `interleaved`, kernels hold the rotated columns of q and k in another order: columns 2m
    and 2m + 1 of a tile are the columns m and m + columns / 2 in memory, so that pairs are adjacent
    in registers either way. load_tile and store_tile exchange them; logits do not depend on it.
    """

    table: Any  # (P, columns), the interleaved cosines and sines of each position
    columns: Any  # tl.constexpr, the columns of a head that are rotated, the first ones
    interleaved: Any  # tl.constexpr, whether pairs are (2m, 2m + 1), else (m, m + columns / 2)


class OptionalTensors(NamedTuple):
    """The optional tensors of a call. What is None is compiled away and costs nothing."""

    bias: Any = None  # (B, N, L, S), added to the logits
    bias_strides: Any = None  # of its four dimensions; 0 where it is broadcast
    mask: Any = None  # (B, N, L, S) bool, false: the key is hidden from the query
    mask_strides: Any = None  # as bias_strides
    alignment: Any = None  # power of two that divides S and the first element of each row of both
    key_lengths: Any = None  # (B,) int64
    alibi: Any = None  # (N,) slopes
    relative: Any = None  # (B, N, L, 2 clip + 1), q_i . relative_keys of each distance
    clip: Any = None  # distances beyond +-clip count as +-clip
    rope: Any = None  # Rope
    key_rows: Any = None  # (B, S) int64, the batch row of k and v that holds key j
    seed: Any = None  # (1,) int64, of the dropout mask; None: no dropout
    # The next ones are of the tiled kernels alone.
    window_left: Any = None  # a query at position p sees keys p - left to p + right; or both None
    window_right: Any = None
    softcap: Any = None
    sinks: Any = None  # (N,)
    cu_seqlens_q: Any = None  # (B + 1,) int64: packed sequences, which have their own L, S, offset
    cu_seqlens_k: Any = None  # (B + 1,) int64
    longest_q: Any = None  # L and S of the longest sequences, which are those of lse and the masks
    longest_k: Any = None


class Sizes(NamedTuple):
    """The scalars that every attention kernel receives, in the order of the kernels' parameters."""

    N: Any  # heads of q
    L: Any  # queries
    S: Any  # keys
    offset: Any  # position of query 0, where key 0 has position 0
    threshold: Any  # of dropout, see philox.threshold
    scale: Any  # of q k^T
    keep_scale: Any  # factor of the probabilities that dropout keeps
    group: Any  # query heads that share a head of k and v: N / N_kv


class Config(NamedTuple):
    """The compile-time arguments that every attention kernel receives."""

    D: Any  # columns of a head
    BD: Any  # columns of a tile of a head; D is processed in ceil(D / BD) chunks
    BM: Any  # queries of a tile
    BN: Any  # keys of a tile
    CAUSAL: Any
    PRECISION: Any  # of tl.dot in fp32: "ieee" or "tf32"
    BYTES: Any  # power of two that divides the address of each row of the inputs
    SPECIALIZED: Any = False  # whether warps of their own load, of the tiled forward kernel alone


class Heads(NamedTuple):
    """A (B, N, L, D) tensor whose last stride is 1, or a tensor descriptor of it."""

    pointer: Any
    strides: Any  # of the first three dimensions; None: `pointer` is a descriptor


@triton.jit
def add_last_dimension(x):
    return tl.expand_dims(x, -1)


@triton.jit
def transposed(x):
    """Returns x with its last two dimensions exchanged."""
    if len(x.shape) == 2:
        return tl.trans(x)
    else:
        return tl.permute(x, (0, 2, 1))


@triton.jit
def operand(x, dtype: tl.constexpr, K: tl.constexpr):
    """Returns x in a dtype, as an operand of a tl.dot over K elements that was not just loaded.

    Triton lets a thread hold as many neighbouring elements of an operand as fill 32 bits in the
    narrowest type from which the operand was computed: up to 8, where that is the bool of a mask.
    Four threads then hold 32 elements; a product over 16 takes half of them twice and the others
    not at all (Triton's pull request 11691, of September 2026, corrects that). The assembly, which
    Triton does not look through, since it might have effects, hides what came before it.
    """
    y = x.to(dtype)
    if COMPILED and K < 32:
        pack: tl.constexpr = 32 // y.dtype.primitive_bitwidth
        y = tl.inline_asm_elementwise(
            "mov.b32 $0, $1;", "=r,r", [y], dtype=y.dtype, is_pure=False, pack=pack
        )
    return y


@triton.jit
def even_and_odd_columns(x):
    shape: tl.constexpr = x.shape
    if len(shape) == 2:
        return tl.split(tl.reshape(x, (shape[0], shape[1] // 2, 2)))
    else:
        return tl.split(tl.reshape(x, (shape[0], shape[1], shape[2] // 2, 2)))


@triton.jit
def rotated(a, b, angles, sign: tl.constexpr):
    """Rotates the pairs (a, b), (..., BD / 2) fp32 each, by a rope's angles; backwards if sign is
    -1."""
    cos, sin = even_and_odd_columns(angles)
    sin = sin * sign
    return a * cos - b * sin, a * sin + b * cos


@triton.jit
def joined(a, b):
    """Returns the tile whose even columns are a and whose odd columns are b."""
    pairs = tl.join(a, b)
    shape: tl.constexpr = pairs.shape
    if len(shape) == 3:
        return tl.reshape(pairs, (shape[0], 2 * shape[1]))
    else:
        return tl.reshape(pairs, (shape[0], shape[1], 2 * shape[2]))


@triton.jit
def load_angles(rope, position, inside, d0, C: tl.constexpr):
    """Returns columns d0 : d0 + BD of the rows `position` of the rope's table, fp32; behind the
    table's last column the cosine 1 and the sine 0."""
    d = d0 + tl.arange(0, C.BD)
    address = rope.table + add_last_dimension(position.to(tl.int64) * rope.columns) + d
    mask = add_last_dimension(inside) & (d < rope.columns)
    angles = tl.load(address, mask=mask, other=0.0).to(tl.float32)
    if rope.columns < C.D:
        angles = tl.where(d < rope.columns, angles, 1.0 - (d % 2))
    return angles


@triton.jit
def columns_of_pairs(rope, d0, C: tl.constexpr):
    """Returns the columns in memory of the even and of the odd columns of a tile, (BD / 2,) each,
    for a rope that is not interleaved. Columns from D on stay where they are: they must not be
    taken for columns of the second half."""
    m = d0 // 2 + tl.arange(0, C.BD // 2)
    if rope.columns == C.D and C.D % C.BD == 0:
        return m, m + C.D // 2
    else:
        is_rotated = 2 * m < rope.columns
        half: tl.constexpr = rope.columns // 2
        return tl.where(is_rotated, m, 2 * m), tl.where(is_rotated, m + half, 2 * m + 1)


@triton.jit
def load_tile(x, b, n, i, inside, d0, rope, position, C: tl.constexpr):
    """Returns columns d0 : d0 + BD of the rows i of x[b, n]; 0 in rows that are not inside.

    x: Heads    rope: rotates the rows by the angles of `position`, or None    C: Config

    Triton cannot derive the alignment of a row from strides and base addresses that are not
    multiples of 16, and would load 2 bytes at a time. tl.multiple_of on the row pointers states it;
    on the strides it has no effect.
    """
    batch_offset = b.to(tl.int64) * x.strides[0]
    rows = x.pointer + (
        batch_offset + n.to(tl.int64) * x.strides[1] + i.to(tl.int64) * x.strides[2]
    )
    if len(rows.shape) == 1:
        rows = tl.multiple_of(rows, C.BYTES)
    else:
        rows = tl.multiple_of(rows, (C.BYTES, C.BYTES))
    if rope is None:
        return load_columns(rows, d0 + tl.arange(0, C.BD), inside, C)
    else:
        if rope.interleaved:
            loaded = load_columns(rows, d0 + tl.arange(0, C.BD), inside, C)
            even, odd = even_and_odd_columns(loaded.to(tl.float32))
        else:
            first, second = columns_of_pairs(rope, d0, C)
            even = load_columns(rows, first, inside, C).to(tl.float32)
            odd = load_columns(rows, second, inside, C).to(tl.float32)
        even, odd = rotated(even, odd, load_angles(rope, position, inside, d0, C), 1)
        return operand(joined(even, odd), x.pointer.dtype.element_ty, C.BD)


@triton.jit
def load_described(x, b, n, j0, d0, C: tl.constexpr):
    """Returns columns d0 : d0 + BD of the rows j0 : j0 + BN of x[b, n], by a tensor descriptor: one
    thread of a block starts the copy to shared memory (TMA, from sm_90 on). 0 behind the last row
    and column."""
    return tl.reshape(x.pointer.load([b, n, j0, d0]), (C.BN, C.BD))


@triton.jit
def load_columns(rows, d, inside, C: tl.constexpr):
    """Returns the columns d of rows, which are pointers; 0 in rows that are not inside."""
    mask = add_last_dimension(inside)
    if C.D % C.BD != 0:
        mask = mask & (d < C.D)
    return tl.load(add_last_dimension(rows) + d, mask=mask, other=0.0)


@triton.jit
def store_tile(x, value, b, n, i, inside, heads, length, d0, rope, position, C: tl.constexpr):
    """Stores value (..., BD) in columns d0 : d0 + BD of the rows i of x[b, n], where inside.

    x: pointer to a tensor that is stored as (B, length, heads, D)
    heads: N, or more where x is a part of the gradient of one projection
    rope: rotates the rows back by the angles of `position`, as a rotation's gradient; or None
    """
    rows = x + ((b.to(tl.int64) * length + i) * heads + n) * C.D
    if rope is None:
        store_columns(rows, d0 + tl.arange(0, C.BD), value, inside, C)
    else:
        even, odd = even_and_odd_columns(value)
        even, odd = rotated(even, odd, load_angles(rope, position, inside, d0, C), -1)
        if rope.interleaved:
            store_columns(rows, d0 + tl.arange(0, C.BD), joined(even, odd), inside, C)
        else:
            first, second = columns_of_pairs(rope, d0, C)
            store_columns(rows, first, even, inside, C)
            store_columns(rows, second, odd, inside, C)


@triton.jit
def store_columns(rows, d, value, inside, C: tl.constexpr):
    """Stores value in the columns d of rows, which are pointers, where inside."""
    mask = add_last_dimension(inside)
    if C.D % C.BD != 0:
        mask = mask & (d < C.D)
    tl.store(add_last_dimension(rows) + d, value.to(rows.dtype.element_ty), mask=mask)


@triton.jit
def end_of_keys(optional, b, S):
    """Returns the number of keys of batch row b. Keys behind it may be NaN: they are not loaded."""
    if optional.key_lengths is None:
        return S
    else:
        return tl.minimum(S, tl.load(optional.key_lengths + b).to(tl.int32))


@triton.jit
def batch_row_of_keys(optional, b, j, inside, S):
    """Returns the batch row of k and v that holds the keys j of batch row b."""
    if optional.key_rows is None:
        return b
    else:
        return tl.load(optional.key_rows + b.to(tl.int64) * S + j, mask=inside, other=0)


@triton.jit
def query_row(b, n, i, sizes, optional):
    """Returns the row of query i among the (B, N, L) rows of lse, relative and the dropout mask."""
    if optional.cu_seqlens_q is None:
        return (b.to(tl.int64) * sizes.N + n) * sizes.L + i
    else:
        return (b.to(tl.int64) * sizes.N + n) * optional.longest_q + i


@triton.jit
def sequence(optional, b):
    """Returns the first query and the first key of packed sequence b among all rows, its numbers of
    queries and keys, and the position of its first query."""
    first_q = tl.load(optional.cu_seqlens_q + b)
    first_k = tl.load(optional.cu_seqlens_k + b)
    L = (tl.load(optional.cu_seqlens_q + b + 1) - first_q).to(tl.int32)
    S = (tl.load(optional.cu_seqlens_k + b + 1) - first_k).to(tl.int32)
    return first_q, first_k, L, S, S - L


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
def exp_of_difference(s, shift):
    """Returns exp(s - shift log 2) of logits s; shift is in units of log 2.

    In one fused multiply-add s log2(e) is not rounded. That rounding alone would change the
    exponential of a logit of 400 by up to 2e-5. The rounding of shift is a factor of all
    exponentials of a query, and cancels where they are divided by their sum.
    """
    return tl.math.exp2(tl.math.fma(s, LOG2E, -shift))


@triton.jit
def softmax(s):
    """Softmax of logits s over the last dimension.

    Returns the probabilities, and the log-sum-exp in natural units. A row that sees no key has
    probabilities 0 and a log-sum-exp of +inf, with which backward recomputes probabilities of 0.
    The probability of a key that is seen alone is exactly 1, whatever its exponential is, so that
    the gradient of its logit is exactly 0.
    """
    axis: tl.constexpr = len(s.shape) - 1
    top = tl.max(s, axis) * LOG2E
    top = tl.where(top == float("-inf"), 0.0, top)
    e = exp_of_difference(s, add_last_dimension(top))
    total = tl.sum(e, axis)
    sees_nothing = total == 0
    total = tl.where(sees_nothing, 1.0, total)
    inverse = add_last_dimension(1.0 / total)
    p = tl.where(e == add_last_dimension(total), 1.0, e * inverse)
    return p, tl.where(sees_nothing, float("inf"), (top + tl.math.log2(total)) * LN2)


@triton.jit
def dropout(x, optional, row, j0, BS: tl.constexpr, sizes, TRANSPOSED: tl.constexpr):
    """Applies the dropout mask, if there is one, to a tile x for keys j0 : j0 + BS.

    j0: a multiple of 4    row: of `query_row`, in the shape of x without its keys
    TRANSPOSED: x is (keys, queries)
    """
    if optional.seed is None:
        return x
    else:
        # One Philox block has the words of four neighbouring keys.
        block = j0 // 4 + tl.arange(0, BS // 4)
        seed = tl.load(optional.seed)
        if optional.cu_seqlens_k is None:
            first_block = row * tl.cdiv(sizes.S, 4)
        else:
            first_block = row * tl.cdiv(optional.longest_k, 4)
        if TRANSPOSED:
            counter = first_block[None, :] + add_last_dimension(block)
            keep = philox.keep_transposed(seed, counter, sizes.threshold)
        else:
            counter = add_last_dimension(first_block) + block
            keep = philox.keep(seed, counter, sizes.threshold)
        return tl.where(keep, x * sizes.keep_scale, 0.0)


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
