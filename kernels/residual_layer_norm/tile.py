"""Gives the position of a tile, and computes residual + dropout(x) in it, for both directions."""

from typing import Any, NamedTuple

import triton
import triton.language as tl
from fusedseq.kernels import row_tiles

UNSPECIALIZED = ["M", "threshold"]


class Dropout(NamedTuple):
    """The arguments of the dropout mask; they are not read if there is no dropout."""

    seed: Any  # (1,) int64
    threshold: Any  # see philox.threshold
    scale: Any  # factor of the elements that are kept


class Tile(NamedTuple):
    """The position of an (R, N) tile of the matrices."""

    row: Any  # (R,) int64
    column: Any  # the first column
    columns: Any  # (N,)
    offset: Any  # (R, N) int64, of each element
    inside: Any  # (R, N) or (1, N), whether it is inside of the matrix


@triton.jit
def tile_of_rows(row, M, D, N: tl.constexpr):
    """Returns the Tile of whole rows."""
    columns = tl.arange(0, N)
    inside = (row < M)[:, None] & (columns < D)[None, :]
    return Tile(row, 0, columns, row[:, None] * D + columns[None, :], inside)


@triton.jit
def tile_of_chunk(row, column, D, N: tl.constexpr):
    """Returns the Tile of columns column : column + N of rows that exist."""
    columns = column + tl.arange(0, N)
    inside = (columns < D)[None, :]
    return Tile(row, column, columns, row[:, None] * D + columns[None, :], inside)


@triton.jit
def load(p, offset, inside):
    """Returns elements in fp32; 0 where not inside."""
    return tl.load(p + offset, mask=inside, other=0.0).to(tl.float32)


@triton.jit
def apply_dropout(s, tile, dropout, D, N: tl.constexpr):
    keep = row_tiles.keep_mask(dropout.seed, tile.row, tile.column, D, dropout.threshold, N)
    return tl.where(keep, s * dropout.scale, 0.0)


@triton.jit
def residual_sum(x, residual, tile, dropout, D, DROPOUT: tl.constexpr, N: tl.constexpr):
    """Returns a tile of s = residual + dropout(x); 0 where not inside."""
    s = load(x, tile.offset, tile.inside)
    if DROPOUT:
        s = apply_dropout(s, tile, dropout, D, N)
    if residual is not None:
        s += load(residual, tile.offset, tile.inside)
    return s
