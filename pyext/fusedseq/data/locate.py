"""Where a task's files are: `--data DIR`, else the environment variable FUSEDSEQ_DATA."""

import gzip
import os
from pathlib import Path

VARIABLE = "FUSEDSEQ_DATA"


def locate(task, choices, data=None, folders=()):
    """The files of a task, all from the first directory and naming that has them all.

    choices: lists of file names, each list one complete set; a name may be there plain or with .gz after it
    data: a directory holding them, or holding a directory named as the task, or as one of `folders`, that does; None
        reads FUSEDSEQ_DATA
    returns the paths of the first complete set; FileNotFoundError names every file looked for
    """
    looked = []
    for directory in directories(task, data, folders):
        for names in choices:
            candidates = [(directory / name, directory / f"{name}.gz") for name in names]
            found = [next((path for path in pair if path.is_file()), None) for pair in candidates]
            if all(found):
                return found
            looked.append(f"{directory}/{{{','.join(names)}}}[.gz]")
    raise FileNotFoundError(f"{task}: data files not found, looked for {' and '.join(looked)}")


def directories(task, data=None, folders=()):
    """Where the files of a task may lie, in the order they are looked for; see `locate`."""
    root = data or os.environ.get(VARIABLE)
    if not root:
        raise FileNotFoundError(f"{task}: no data given: use --data DIR, --data synthetic, or set {VARIABLE}")
    return [Path(root), *(Path(root) / folder for folder in (task, *folders))]


def read_lines(path):
    """The lines of a UTF-8 text file, gzip-compressed where its name ends in .gz; only \\n ends one: a stray carriage
    return within a line would set parallel files off against each other."""
    opener = gzip.open if path.suffix == ".gz" else open
    try:
        with opener(path, "rt", encoding="utf-8-sig", newline="\n") as file:
            yield from file
    except (EOFError, gzip.BadGzipFile, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is not readable text: {error}") from None
