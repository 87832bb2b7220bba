"""Which kernels a call of attention runs, and in what tiles: pinned, by shape and size of a number alone.

Tuning at run time would make a result depend on the clock. None of these figures has been timed on a GPU: they are the
largest tiles tried that compile without spills for sm_80, sm_90 and sm_100, but for a few bytes in heads wider than 128
(tests/triton_table.json has registers and shared memory, tests/test_triton_compile.py the exceptions).
"""

from typing import NamedTuple

PACKED, ROW = 16, 128  # the most keys
PROGRAMS = 512  # as many as a GPU has room for at once, for kernels that can be cut further


class Plan(NamedTuple):
    family: str  # packed, row or tiled: kernels/attention_<family>.py
    why: str
    forward: dict  # of each kernel: BD columns of a head at once, other tile sizes, warps, stages
    backward: dict  # of tiled the kernel of the keys
    queries: dict | None = None  # of tiled alone, these and the next
    bias: dict | None = None
    delta: dict | None = None


PLAIN, DROPOUT, RICH = range(3)  # what takes registers beside the products; rich: a bias, mask, rope or relative keys

# (width of a head, options): BM, BN, BD, warps, stages of the kernels forward, keys and queries; 16-bit numbers
TILED = {
    (64, PLAIN): ((128, 64, 64, 8, 3), (32, 128, 64, 8, 2), (64, 64, 64, 8, 2)),
    (64, DROPOUT): ((128, 64, 64, 8, 3), (32, 64, 64, 8, 1), (64, 32, 64, 8, 2)),
    (64, RICH): ((64, 32, 64, 4, 2), (32, 32, 64, 8, 2), (32, 32, 64, 8, 2)),
    (128, PLAIN): ((128, 64, 128, 8, 2), (32, 64, 128, 8, 2), (64, 64, 128, 8, 2)),
    (128, DROPOUT): ((64, 64, 128, 8, 2), (32, 32, 128, 8, 2), (64, 32, 128, 8, 2)),
    (128, RICH): ((64, 32, 128, 8, 2), (32, 32, 128, 8, 2), (32, 16, 128, 8, 2)),
    (256, PLAIN): ((64, 64, 128, 8, 2), (32, 64, 128, 8, 2), (64, 64, 128, 8, 2)),
    (256, DROPOUT): ((32, 64, 64, 8, 1), (32, 32, 64, 8, 1), (32, 32, 64, 8, 1)),
    (256, RICH): ((32, 64, 64, 8, 1), (32, 32, 32, 4, 1), (32, 32, 64, 8, 1)),
}  # fmt: skip


def plan(L, S, D, itemsize, options):
    width = max(16, 1 << (D - 1).bit_length())
    if max(L, S) <= PACKED:
        return packed(width, itemsize, options)
    if S <= ROW and L <= 4 * ROW and itemsize == 2 and width <= 64:
        return row(L, S, max(width, 32), options)
    return (tiled_fp32 if itemsize == 4 else tiled)(L, width, options)


def parts_of_keys(chosen, heads, L, S, D):
    """In how many parts the keys of each head go to kernels/attention_split.py; 0: the plan `chosen` is kept to."""
    if chosen.family != "tiled" or L > 4:
        return 0
    programs = heads * cdiv(D, chosen.forward["BD"])
    parts = min(32, S // 256, PROGRAMS // max(programs, 1))
    return parts if parts > 1 else 0


def cdiv(a, b):
    return -(-a // b)


def packed(width, itemsize, options):
    BD, room = (min(width, 32), 32) if itemsize == 4 else (min(width, 64), 64 if options == RICH else 128)
    forward = {"G": room // BD, "BD": BD, "warps": 1}
    backward = {"G": max(1, room // 2 // BD), "BD": BD, "warps": 1}
    return Plan("packed", f"L and S at most {PACKED}", forward, backward)


def row(L, S, width, options):
    BM, BS = (16 if L <= 16 else 32 if L <= 32 or options == RICH else 64), max(16, 1 << (S - 1).bit_length())
    forward = {"BM": BM, "BS": BS, "BD": width, "warps": 8 if options == RICH else 4}
    backward = {"BM": min(BM, 16 if options else 32), "BS": BS, "BD": width, "warps": 8 if options or BS == 128 else 4}
    return Plan("row", f"S at most {ROW}", forward, backward)


def tiled(L, width, options):
    kernels = [tiles(*size, width) for size in TILED[min(max(width, 64), 256), options]]
    if L <= 16:
        kernels[0] = tiles(16, 64, 64 if options == RICH else 128, 4, 1, width)
    return with_the_rest(kernels, width)


def tiled_fp32(L, width, options):
    backward = tiles(32, 32, 32, 4, 1, width) if options == RICH else tiles(32, 32, 64, 8, 1, width)
    return with_the_rest([tiles(16 if L <= 16 else 32, 32, 32, 4, 1, width), backward, backward], width)


def tiles(BM, BN, BD, warps, stages, width):
    return {"BM": BM, "BN": BN, "BD": min(BD, width), "warps": warps, "stages": stages}


def with_the_rest(kernels, width):
    why = f"more than {ROW} keys, or heads too large for them at once"
    why += "; D in chunks" * (width > kernels[0]["BD"])
    bias, delta = tiles(32, 16, 32, 4, 1, width), {"BM": 32, "BD": min(width, 128), "warps": 4}
    forward, keys, queries = kernels
    return Plan("tiled", why, forward, keys, queries, bias, delta)
