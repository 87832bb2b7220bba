"""Options of `fusedseq eval en-es` and `en-fr`: BLEU, a table of all sentences, samples."""

import argparse
import os
import sys
from collections.abc import Sequence
from dataclasses import fields
from errno import EACCES, EISDIR, ENOENT
from pathlib import Path
from typing import Any

from fusedseq.data.escapes import escaped
from fusedseq.tasks.training.files import refuse_special
from fusedseq.tasks.translation.scoring import samples, translate_split, write_table
from fusedseq.tasks.translation.search import Search
from fusedseq.tasks.translation.task import SOURCES

TASKS = tuple(SOURCES)
OPTIONS = ("beam", "length_penalty", "batch", "max_length", "csv", "samples")


def add_arguments(group: Any) -> None:
    """Adds the options to an argument group of argparse."""
    add = group.add_argument
    add(
        "--beam",
        type=int,
        metavar="K",
        help="translate with K hypotheses per sentence, 1 is greedy, and compute BLEU "
        f"(default if another of these options is given: {Search.beam})",
    )
    add(
        "--length-penalty",
        type=float,
        metavar="ALPHA",
        help="0 ranks by log-probability, more prefers longer translations "
        f"(default: {Search.length_penalty})",
    )
    add("--batch", type=int, help=f"sentences in a batch (default: {Search.batch})")
    add(
        "--max-length",
        type=int,
        metavar="WORDS",
        help="limit of a translation (default: twice the source's words and 10 more, but no more "
        "than the longest sentence of the training has)",
    )
    add(
        "--csv",
        type=Path,
        metavar="FILE",
        help="write source, reference, translation and scores of each sentence",
    )
    add("--samples", type=int, metavar="N", help="print N translations")


def check_writable(path: Path) -> None:
    """Raises OSError or ValueError, which names the place, where --csv cannot be written.

    It is called before the translation, which takes long.
    """
    if path.is_dir():
        raise IsADirectoryError(EISDIR, "--csv must be a file, and this is a directory", str(path))
    if not path.parent.is_dir():
        raise FileNotFoundError(ENOENT, "--csv: there is no such directory", str(path.parent))
    if not os.access(path.parent, os.W_OK):
        raise PermissionError(EACCES, "--csv: this directory is not writable", str(path.parent))
    refuse_special(path)


def check(settings: Any, splits: Sequence[str], args: argparse.Namespace) -> None:
    """Raises ValueError where options contradict each other or are out of range, and OSError where
    the table cannot be written.
    """
    if args.csv and len(splits) > 1:
        raise ValueError(f"--csv requires a single split, got --splits {','.join(splits)}")
    if args.samples is not None and args.samples < 1:
        raise ValueError(f"--samples must be at least 1, got {args.samples}")
    search_of(args)
    if args.csv:
        check_writable(args.csv)


def search_of(args: argparse.Namespace) -> Search:
    """The Search of the options."""
    given = {field.name: getattr(args, field.name, None) for field in fields(Search)}
    return Search(**{name: value for name, value in given.items() if value is not None})


def metrics(task: Any, splits: Sequence[str], args: argparse.Namespace) -> dict[str, dict]:
    """{split: the metrics of its translations}; writes and prints what the options ask for."""
    search, results = search_of(args), {}
    for split in splits:
        results[split], table = translate_split(task, split, search)
        if args.csv:
            write_table(args.csv, table)
        if args.samples:
            print(
                escaped(samples(table, args.samples)) + "\n",
                file=sys.stderr if args.json else sys.stdout,
            )
    return results
