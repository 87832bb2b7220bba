"""Sentence pairs in files: two files of one sentence a line, or one file of pairs parted by a tab."""

from fusedseq.data.locate import read_lines


def read_parallel(source, target):
    """The pairs of two files whose lines correspond, stripped; the last line needs no end. Pairs with an empty side are
    kept, as ("", ...), so that numbers stay those of the lines."""
    sides = [[line.strip() for line in read_lines(path)] for path in (source, target)]
    if len(sides[0]) != len(sides[1]):
        raise ValueError(f"{source} and {target} must have as many lines, got {len(sides[0])} and {len(sides[1])}")
    return list(zip(*sides, strict=True))


def read_tabbed(path):
    """The pairs of a file of SOURCE <tab> TARGET lines; columns after these (an attribution) are not read."""
    pairs = []
    for number, line in enumerate(read_lines(path), 1):
        if not line.strip():
            continue
        columns = line.rstrip("\r\n").split("\t")
        if len(columns) < 2:
            raise ValueError(f"{path}, line {number}: must be two sentences parted by a tab, got {line.strip()[:60]!r}")
        pairs.append((columns[0].strip(), columns[1].strip()))
    return pairs


def without_gaps(pairs):
    """The pairs both of whose sides have text, and the others' count."""
    whole = [pair for pair in pairs if all(pair)]
    return whole, len(pairs) - len(whole)
