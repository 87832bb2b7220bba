"""Finds the files of a task: in `--data DIR`, or in the environment variable FUSEDSEQ_DATA."""

import io
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from fusedseq.data.compressed import DAMAGE, opened

VARIABLE = "FUSEDSEQ_DATA"


def locate(
    task: str,
    choices: Sequence[Sequence[str]],
    data: str | None = None,
    folders: Sequence[str] = (),
) -> list[Path]:
    """Returns the paths of the first complete set of files, all in one directory.

    choices: lists of file names, each list one complete set; a file may also be compressed, with
        .gz after its name
    data: a directory that contains them, or that contains a directory, named as the task or as one
        of `folders`, which does; None reads FUSEDSEQ_DATA
    Errors: FileNotFoundError that names every file searched for.
    """
    searched = []
    for directory in directories(task, data, folders):
        for names in choices:
            candidates = [(directory / name, directory / f"{name}.gz") for name in names]
            found = [next((path for path in pair if path.is_file()), None) for pair in candidates]
            files = [path for path in found if path is not None]
            if len(files) == len(names):
                return files
            searched.append(f"{directory}/{{{','.join(names)}}}[.gz]")
    raise FileNotFoundError(f"{task}: data files not found, looked for {' and '.join(searched)}")


def root_of(data: str | None) -> str | None:
    """Returns `data`, or without it the value of FUSEDSEQ_DATA."""
    return data or os.environ.get(VARIABLE)


def described(data: str | None) -> str:
    """Returns words for the data of `data`: 'synthetic', a directory, or None for FUSEDSEQ_DATA."""
    return "the generated data" if data == "synthetic" else f"the data in {root_of(data)}"


@contextmanager
def named_data(task: str, data: str | None) -> Iterator[None]:
    """Names the task and its data in a ValueError of the block. data: as for `described`"""
    try:
        yield
    except ValueError as error:
        raise ValueError(f"{task}: {described(data)}: {error}") from None


def directories(task: str, data: str | None = None, folders: Sequence[str] = ()) -> list[Path]:
    """Returns the directories in which the files of a task may be, in order; see `locate`.

    Errors: FileNotFoundError if neither `data` nor FUSEDSEQ_DATA is given.
    """
    if not (root := root_of(data)):
        raise FileNotFoundError(
            f"{task}: no data given: use --data DIR, --data synthetic, or set {VARIABLE}"
        )
    return [Path(root), *(Path(root) / folder for folder in (task, *folders))]


def read_lines(path: Path) -> Iterator[str]:
    r"""Yields the lines of a UTF-8 text file, which is gzip-compressed if its name ends in .gz.

    Only \n ends a line: a stray carriage return within a line would shift parallel files against
    each other.
    Errors: ValueError, which names the file, for one that is not such text, is damaged, or expands
        to more than data.compressed allows.
    """
    try:
        with io.TextIOWrapper(opened(path), encoding="utf-8-sig", newline="\n") as file:
            yield from file
    except (*DAMAGE, ValueError) as error:
        raise ValueError(f"{path} is not readable text: {error}") from None
