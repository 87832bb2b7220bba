"""Finds the files of a task: in `--data DIR`, or in the environment variable FUSEDSEQ_DATA."""

import io
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

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
    Errors: FileNotFoundError, see `directories` and `not_found`.
    """
    searched: list[str] = []
    incomplete: list[Incomplete] = []
    for directory in directories(task, data, folders):
        for names in choices:
            candidates = [(directory / name, directory / f"{name}.gz") for name in names]
            found = [next((path for path in pair if path.is_file()), None) for pair in candidates]
            files = [path for path in found if path is not None]
            if len(files) == len(names):
                return files
            searched.append(f"{directory}/{{{','.join(names)}}}[.gz]")
            missing = [name for name, path in zip(names, found, strict=True) if path is None]
            if files:
                incomplete.append(Incomplete(directory, [path.name for path in files], missing))
    raise not_found(task, searched, incomplete)


class Incomplete(NamedTuple):
    """A directory with some files of a set; the names are those of files."""

    directory: Path
    present: list[str]
    missing: list[str]


def not_found(
    task: str, searched: Sequence[str], incomplete: Sequence[Incomplete]
) -> FileNotFoundError:
    """Returns the error for data that are not found.

    It names the missing files of the set of which most files are present, or, where no directory
    has any of them, all files searched for.
    """
    if not incomplete:
        return FileNotFoundError(
            f"{task}: data files not found, looked for {' and '.join(searched)}"
        )
    best = max(incomplete, key=lambda found: len(found.present))
    return FileNotFoundError(
        f"{task}: data files not found: {best.directory} has {', '.join(best.present)}, and lacks "
        f"{', '.join(best.missing)}"
    )


def root_of(data: str | None) -> str | None:
    """Returns `data`, or the value of FUSEDSEQ_DATA where it is None."""
    return os.environ.get(VARIABLE) if data is None else data


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

    Errors: FileNotFoundError if neither `data` nor FUSEDSEQ_DATA is given, or if it is not a
    directory.
    """
    if not (root := root_of(data)):
        raise FileNotFoundError(
            f"{task}: no data given: use --data DIR, --data synthetic, or set {VARIABLE}"
        )
    if not Path(root).is_dir():
        name = f"{VARIABLE} must be a directory" if data is None else "--data must be a directory"
        why = "is not one" if Path(root).exists() else "does not exist"
        raise FileNotFoundError(f"{name}, got {root}, which {why}")
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
