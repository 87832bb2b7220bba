"""`--sample=FACTOR`: only a part of the most expensive tests runs.

Of a test marked `sampled(n)` one case in n * FACTOR runs, at least one. Of the files marked
`sampled_files(name, n)` with the same name one in n * FACTOR runs, at least one: those are files
that compile the CUDA sources for minutes before their first case.

The files that decide the results of such tests are hashed, and the hash chooses: one state of the
sources always runs the same cases, and another state runs others.

`--until=SECONDS`: the tests so marked run last, and those that have not started at that time are
skipped.
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


def sample(items: Sequence[Any], checksum: int, factor: int = 1) -> list[Any]:
    """The items without a mark, of the cases of each marked test one in n * factor, and of each
    name's files one in n * factor, both rounded up.
    """
    files: dict[tuple[str, int], set[str]] = defaultdict(set)
    cases = defaultdict(list)
    for item in items:
        if mark := item.get_closest_marker("sampled_files"):
            files[mark.args].add(file_of(item))
        if item.get_closest_marker("sampled"):
            cases[item.nodeid.partition("[")[0]].append(item)
    skipped_files = {
        file
        for (_, n), found in files.items()
        for file in skipped(sorted(found), n * factor, checksum)
    }
    skipped_cases: set[str] = set()
    for found in cases.values():
        (n,) = found[0].get_closest_marker("sampled").args
        skipped_cases.update(skipped([item.nodeid for item in found], n * factor, checksum))
    return [
        item
        for item in items
        if item.nodeid not in skipped_cases and file_of(item) not in skipped_files
    ]


def is_sampled(item: Any) -> bool:
    return any(item.get_closest_marker(name) for name in ("sampled", "sampled_files"))


def file_of(item: Any) -> str:
    return str(item.nodeid.partition("::")[0])


def skipped(names: Sequence[str], n: int, checksum: int) -> list[str]:
    """All names but one in n, in the order of their hashes."""
    ordered = sorted(names, key=lambda name: zlib.crc32(name.encode(), checksum))
    return ordered[math.ceil(len(ordered) / n) :]


def identities(items: Iterable[Any]) -> set[int]:
    return {id(item) for item in items}
