"""Which elements of the matrices of an mma each lane of a warp holds.

The layouts are those that CUTLASS publishes as MMA_Traits (include/cute/atom/mma_traits_sm80.hpp)
in CuTe's notation: a function from (lane, element) to a position in the matrix, stored by columns,
given by shapes and strides. They were not derived from csrc/cuda/ptx.cuh or from
tests/simt/mma.cpp, which state them independently.
"""

from dataclasses import dataclass
from itertools import product

LANES = (4, 8)  # the shape of a lane's number: lane = thread in group + 4 * group


@dataclass(frozen=True)
class Layout:
    rows: int
    lane_strides: tuple
    shape: tuple  # of an element's number, the first part varies fastest
    strides: tuple

    def positions(self):
        """{(lane, element): (row, column)}"""
        return {
            (lane, element): (at % self.rows, at // self.rows)
            for lane, lane_at in _offsets(LANES, self.lane_strides)
            for element, element_at in _offsets(self.shape, self.strides)
            for at in [lane_at + element_at]
        }


def _offsets(shape, strides):
    """(number, offset) of each coordinate in `shape`."""
    coordinates = product(*(range(extent) for extent in reversed(shape)))
    for number, coordinate in enumerate(coordinates):
        yield number, sum(i * s for i, s in zip(reversed(coordinate), strides, strict=True))


@dataclass(frozen=True)
class Mma:
    """An mma of a warp: a is (16, k) and d (16, 8). CuTe stores b as (8, k)."""

    k: int
    a: Layout
    b: Layout
    bits: int  # of an element of a and b

    def table(self, name):
        """The positions of a, b or d as C++ reads them: by lane and element, stored by rows."""
        layout, columns = {"a": (self.a, self.k), "b": (self.b, self.k), "d": (D, 8)}[name]
        positions = layout.positions()
        by_rows = {
            key: (column * 8 + row if name == "b" else row * columns + column)
            for key, (row, column) in positions.items()
        }
        return [by_rows[key] for key in sorted(by_rows)]


D = Layout(16, (32, 1), (2, 2), (16, 8))  # SM80_16x8_Row
MMA = {
    "m16n8k16": Mma(  # SM80_16x8x16_F32BF16BF16F32_TN, SM80_16x8x16_F32F16F16F32_TN
        16, Layout(16, (32, 1), (2, 2, 2), (16, 8, 128)), Layout(8, (16, 1), (2, 2), (8, 64)), 16
    ),
    "m16n8k8": Mma(  # SM80_16x8x8_F32BF16BF16F32_TN, SM80_16x8x8_F32F16F16F32_TN
        8, Layout(16, (32, 1), (2, 2), (16, 8)), Layout(8, (16, 1), (2,), (8,)), 16
    ),
    "m16n8k8 tf32": Mma(  # SM80_16x8x8_F32TF32TF32F32_TN
        8, Layout(16, (16, 1), (2, 2), (8, 64)), Layout(8, (8, 1), (2,), (32,)), 32
    ),
}


def identifier(shape):
    return shape.replace(" ", "_")


def as_cpp():
    """The layouts as C++ constants of type ptx::MmaLayout."""
    lines = []
    for shape, mma in MMA.items():
        name = identifier(shape)
        for matrix in "abd":
            values = ", ".join(map(str, mma.table(matrix)))
            lines.append(f"static constexpr unsigned char {name}_{matrix}[] = {{{values}}};")
        counts = f"{mma.k}, {len(mma.table('a')) // 32}, {len(mma.table('b')) // 32}, {mma.bits}"
        tables = ", ".join(f"{name}_{matrix}" for matrix in "abd")
        lines.append(f"inline constexpr ptx::MmaLayout {name}{{{counts}, {tables}}};")
    return "\n".join(lines) + "\n"
