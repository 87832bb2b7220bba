"""Loads and stores tiles of the rows of a head, and rotates them by a rotary position embedding.

The indices b, n, i of batch row, head and row have shapes that broadcast, see logits.py.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

COMPILED = tl.constexpr(not triton.knobs.runtime.interpret)


class Rope(NamedTuple):
    """A rotary position embedding of queries and keys.

    Without `interleaved`, kernels hold the rotated columns of q and k in another order: columns 2m
    and 2m + 1 of a tile are the columns m and m + columns / 2 in memory, so that pairs are adjacent
    in registers either way. load_tile and store_tile exchange them; logits do not depend on it.
    """

    table: Any  # (P, columns), the interleaved cosines and sines of each position
    columns: Any  # tl.constexpr, the columns of a head that are rotated, the first ones
    interleaved: Any  # tl.constexpr, whether pairs are (2m, 2m + 1), else (m, m + columns / 2)


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

    x: Heads    rope: rotates the rows by the angles of `position`, or None    C: arguments.Config

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
