"""`--sample`: of a test marked `sampled(n)` only every nth case runs, at least one.

The files that decide such a test's result are hashed, and the hash chooses the cases: one state of
the sources always runs the same cases, and another state runs others.
"""

import math
import zlib
from collections import defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = ("csrc", "kernels", "tests/simt", "tests/ptx", "tests/triton")
SUFFIXES = (".cpp", ".h", ".cu", ".cuh", ".py")


def checksum_of_sources() -> int:
    found = 0
    for folder in FOLDERS:
        for path in sorted((ROOT / folder).rglob("*")):
            if path.suffix in SUFFIXES:
                found = zlib.crc32(path.read_bytes(), found)
    return found


def sample(items: Sequence[Any], checksum: int) -> list[Any]:
    """The items without the mark, and of the cases of each marked test one in n, rounded up."""
    cases = defaultdict(list)
    for item in items:
        if item.get_closest_marker("sampled"):
            cases[item.nodeid.partition("[")[0]].append(item)
    left_out: set[int] = set()
    for found in cases.values():
        (n,) = found[0].get_closest_marker("sampled").args
        found.sort(key=lambda item: zlib.crc32(item.nodeid.encode(), checksum))
        left_out |= identities(found[math.ceil(len(found) / n) :])
    return [item for item in items if id(item) not in left_out]


def identities(items: Iterable[Any]) -> set[int]:
    return {id(item) for item in items}
