"""Reads sentence pairs from two files of one sentence per line, or one file with tabs."""

from collections.abc import Sequence
from pathlib import Path

from fusedseq.data.locate import read_lines


def read_parallel(source: Path, target: Path) -> list[tuple[str, str]]:
    """Returns the pairs of two files whose lines correspond, without surrounding whitespace.

    Pairs with an empty side are returned too, so that the number of a pair is that of its line.
    Errors: ValueError for files with different numbers of lines.
    """
    sides = [[line.strip() for line in read_lines(path)] for path in (source, target)]
    if len(sides[0]) != len(sides[1]):
        raise ValueError(
            f"{source} and {target} must have as many lines, got {len(sides[0])} and "
            f"{len(sides[1])}"
        )
    return list(zip(sides[0], sides[1], strict=True))


def read_tabbed(path: Path) -> list[tuple[str, str]]:
    """Returns the pairs of a file of SOURCE <tab> TARGET lines; further columns are ignored.

    Errors: ValueError, with the line's number, for a line without a tab.
    """
    pairs = []
    for number, line in enumerate(read_lines(path), 1):
        if not line.strip():
            continue
        columns = line.rstrip("\r\n").split("\t")
        if len(columns) < 2:
            raise ValueError(
                f"{path}, line {number}: must be two sentences separated by a tab, got "
                f"{line.strip()[:60]!r}"
            )
        pairs.append((columns[0].strip(), columns[1].strip()))
    return pairs


def without_gaps(pairs: Sequence[tuple[str, str]]) -> tuple[list[tuple[str, str]], int]:
    """Returns the pairs without an empty side, and the number of the others."""
    whole = [pair for pair in pairs if all(pair)]
    return whole, len(pairs) - len(whole)
