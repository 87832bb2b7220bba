"""Chooses the kernels of an attention call and their tiles, from shapes, dtype size and options.

Tuning at run time would make a result depend on the clock; a user may name a table of measured
tiles instead (fusedseq/kernel_table.py). Tiles are the largest of those tried that compile without
spills for sm_80, sm_90 and sm_100, except for a few bytes in some (tests/triton/triton_table.json
has registers and shared memory, tests/triton/test_triton_compile.py the exceptions). For sm_120 the
same tiles spill up to 80 bytes a thread in fifteen configurations. For heads of 64 those of `PLAIN`
were the fastest of a few on an H200 (bench/results/nvidia-h200-cuda-attention-tiles.json). What
compute capability 9.0 has of its own is in `TILED_HOPPER`.
"""

from typing import NamedTuple

from fusedseq.kernels import tiles_of_current_gpu

MAX_PACKED = 16  # most queries and keys of the packed kernels
MAX_ROW = 128  # most keys of the row kernels
# How the tiled forward kernel loads keys and values; see kernels/attention/tiled.py.
POINTER_LOADS = 0
DESCRIBED_LOADS = 1  # by tensor descriptors
SPECIALIZED_LOADS = 2  # by tensor descriptors, in warps of their own
# Programs that fill a GPU. Work that can be split further is split until there are as many.
PROGRAMS = 512


class Plan(NamedTuple):
    """The kernels of a call. Tiles are {name of a constant: value, "warps": ..., "stages": ...}, of
    the tiled forward kernel also "loads"."""

    family: str  # packed, row or tiled: kernels/attention/<family>.py
    why: str  # for fused.explain
    forward: dict
    backward: dict  # of the tiled family: the kernel for dk and dv
    queries: dict | None = None  # of the tiled family alone, as the next two: the kernel for dq
    bias: dict | None = None  # the kernel for the gradient of a bias
    delta: dict | None = None  # the kernel for the row sums of dout * out


# Register pressure of a call's options beside the matrix products.
PLAIN = 0
DROPOUT = 1
RICH = 2  # a bias, mask, rope, relative keys or softcap
BIAS = 3  # of these a bias or a mask alone, and no dropout; RICH where nothing is known of it

# The tiled kernels whose tiles a table can choose: for out, for dk and dv, and for dq.
TILED_KERNELS = ("forward", "keys", "queries")
# (head dimension, register pressure): BM, BN, BD, warps, stages of TILED_KERNELS; 16-bit dtypes
Size = tuple[int, int, int, int, int]
TILED: dict[tuple[int, int], tuple[Size, Size, Size]] = {
    (64, PLAIN): ((128, 64, 64, 8, 3), (64, 64, 64, 4, 2), (64, 64, 64, 4, 3)),
    (64, DROPOUT): ((128, 64, 64, 8, 3), (32, 64, 64, 8, 1), (64, 32, 64, 8, 2)),
    (64, RICH): ((64, 32, 64, 4, 2), (32, 32, 64, 8, 2), (32, 32, 64, 8, 2)),
    (128, PLAIN): ((128, 64, 128, 8, 2), (32, 64, 128, 8, 2), (64, 64, 128, 8, 2)),
    (128, DROPOUT): ((64, 64, 128, 8, 2), (32, 32, 128, 8, 2), (64, 32, 128, 8, 2)),
    (128, RICH): ((64, 32, 128, 8, 2), (32, 32, 128, 8, 2), (32, 16, 128, 8, 2)),
    (256, PLAIN): ((64, 64, 128, 8, 2), (32, 64, 128, 8, 2), (64, 64, 128, 8, 2)),
    (256, DROPOUT): ((32, 64, 64, 8, 1), (32, 32, 64, 8, 1), (32, 32, 64, 8, 1)),
    (256, RICH): ((32, 64, 64, 8, 1), (32, 32, 32, 4, 1), (32, 32, 64, 8, 1)),
}
# Those that replace them on compute capability 9.0. Its tensor cores are fast where four warps have
# 64 rows of a product, and the product 64 columns or more (wgmma with n64; with n16 an instruction
# waits for its operands in shared memory); and two blocks of four warps hide each other's
# latencies. Each is the fastest, or within 1 % of it, of those timed on an H100, one kernel at a
# time (bench/results/nvidia-h100-cuda-attention-tiles.json), but for dk and dv with (128, PLAIN):
# there the fastest, with which a call takes 0.94 of the time, spills up to 192 bytes. With such
# tiles calls took 0.49 to 0.67 of the time that they took with the tiles above, of heads of 64
# without options 0.97.
TILED_HOPPER: dict[tuple[int, int], tuple[Size, Size, Size]] = {
    (64, PLAIN): ((128, 64, 64, 8, 3), (32, 64, 64, 4, 2), (64, 64, 64, 4, 3)),
    (64, DROPOUT): ((64, 64, 64, 4, 3), (32, 64, 64, 4, 2), (64, 64, 64, 4, 3)),
    (64, BIAS): ((64, 32, 64, 4, 2), (64, 64, 64, 4, 2), (64, 64, 64, 4, 2)),
    (128, PLAIN): ((128, 64, 128, 8, 3), (32, 128, 128, 8, 2), (64, 64, 128, 4, 2)),
    (128, DROPOUT): ((64, 64, 128, 4, 2), (32, 128, 128, 8, 2), (64, 32, 128, 4, 3)),
    (128, BIAS): ((128, 64, 128, 8, 3), (32, 64, 128, 4, 2), (64, 32, 128, 4, 3)),
}


def plan(L, S, D, itemsize, pressure, in_tiles=False, small_bias=False, hopper=False):
    """Returns the Plan of a call.    pressure: PLAIN, DROPOUT, RICH or BIAS

    in_tiles: whether the call has an option that the tiled kernels alone compute
    small_bias: whether the gradient of a bias needs small tiles: with rope or relative keys the
        others spill registers
    hopper: whether the GPU has compute capability 9.0
    """
    # tl.arange and tl.dot need powers of two, tl.dot at least 16.
    width = max(16, 1 << (D - 1).bit_length())
    own, pressure = pressure, min(pressure, RICH)
    if not in_tiles and max(L, S) <= MAX_PACKED:
        return packed(width, itemsize, pressure)
    if not in_tiles and S <= MAX_ROW and L <= 4 * MAX_ROW and itemsize == 2 and width <= 64:
        return row(L, S, max(width, 32), pressure)
    if itemsize == 4:
        return tiled_fp32(L, width, pressure)
    return tiled(L, width, own, small_bias, hopper)


def parts_of_keys(chosen, heads, L, S, D):
    """Returns the number of parts in which split.py processes the keys of each head; 0 if the plan
    `chosen` is used instead."""
    if chosen.family != "tiled" or L > 4:
        return 0
    programs = heads * cdiv(D, chosen.forward["BD"])
    parts = min(32, S // 256, PROGRAMS // max(programs, 1))
    return parts if parts > 1 else 0


def cdiv(a, b):
    return -(-a // b)


def packed(width, itemsize, pressure):
    """G pairs of BD columns share the registers of a warp: G BD is constant."""
    if itemsize == 4:
        BD, columns = min(width, 32), 32
    else:
        BD, columns = min(width, 64), 64 if pressure == RICH else 128
    forward = {"G": columns // BD, "BD": BD, "warps": 1}
    backward = {"G": max(1, columns // 2 // BD), "BD": BD, "warps": 1}
    return Plan("packed", f"L and S at most {MAX_PACKED}", forward, backward)


def row(L, S, width, pressure):
    BS = max(16, 1 << (S - 1).bit_length())
    if L <= 16:
        BM = 16
    else:
        BM = 32 if L <= 32 or pressure == RICH else 64
    forward = {"BM": BM, "BS": BS, "BD": width, "warps": 8 if pressure == RICH else 4}
    backward = {
        "BM": min(BM, 16 if pressure else 32),
        "BS": BS,
        "BD": width,
        # With 4 warps the 64 columns of dk and dv take 0.73 of the time on an H200, 32 a bit more.
        "warps": 8 if (width < 64 and (pressure or BS == 128)) or pressure == RICH else 4,
    }
    return Plan("row", f"S at most {MAX_ROW}", forward, backward)


def sizes_of_tiles(width: int, pressure: int, hopper: bool) -> tuple[Size, Size, Size]:
    """Returns the sizes of TILED_KERNELS's tiles.    width: 64, 128 or 256"""
    usual = TILED[width, min(pressure, RICH)]
    return TILED_HOPPER.get((width, pressure), usual) if hopper else usual


def tiled(L, width, pressure, small_bias=False, hopper=False):
    columns = min(max(width, 64), 256)
    kernels = [tiles(*size, width) for size in sizes_of_tiles(columns, pressure, hopper)]
    pressure = min(pressure, RICH)
    key = columns, pressure
    measured = tiles_of_current_gpu()
    for i, name in enumerate(TILED_KERNELS):
        if found := measured.get((*key, name)):
            BM, BN, BD, warps, stages, *loads = found
            kernels[i] = tiles(BM, BN, BD, warps, stages, width)
            kernels[i] |= {"loads": loads[0]} if loads else {}
    if L <= 16:
        kernels[0] = tiles(16, 64, 64 if pressure == RICH else 128, 4, 1, width)
    return tiled_plan(kernels, width, small_bias)


def tiled_fp32(L, width, pressure):
    forward = tiles(16 if L <= 16 else 32, 32, 32, 4, 1, width)
    if pressure == RICH:
        backward = tiles(32, 32, 32, 4, 1, width)
    else:
        backward = tiles(32, 32, 64, 8, 1, width)
    return tiled_plan([forward, backward, backward], width, True)


def tiles(BM, BN, BD, warps, stages, width):
    return {"BM": BM, "BN": BN, "BD": min(BD, width), "warps": warps, "stages": stages}


def tiled_plan(kernels, width, small_bias):
    """Returns the Plan of the tiled kernels for out, for dk and dv, and for dq; the others have the
    same tiles always, but for `small_bias`."""
    why = f"more than {MAX_ROW} keys, or heads too large for them at once"
    why += "; D in chunks" * (width > kernels[0]["BD"])
    is_small = small_bias or width > 64
    bias = tiles(32, 16, 32, 4, 1, width) if is_small else tiles(64, 32, 64, 4, 1, width)
    delta = {"BM": 32, "BD": min(width, 128), "warps": 4}
    forward, keys, queries = kernels
    return Plan("tiled", why, forward, keys, queries, bias, delta)
