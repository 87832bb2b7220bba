"""`fusedseq list`: every row of the documents, its figures and ours, and the command that runs it."""

import json
import shutil
import sys
from dataclasses import asdict

from fusedseq.tasks import figures, finished
from fusedseq.tasks.catalog import TASKS
from fusedseq.tasks.rows import rows

HEAD = ("row", "document", "ours", "command")


def add_arguments(parser):
    parser.add_argument("task", nargs="?", choices=TASKS, help="only its rows (default: all)")
    parser.add_argument(
        "--runs", metavar="DIR", action="append", default=[],
        help="show the finished runs in this directory too, beside the results that the repository keeps (repeatable)",
    )  # fmt: skip
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")


def run(args):
    sources = [finished.committed(), *map(finished.under, args.runs)]
    lines = [(row, [result for source in sources for result in source.get(row.name, ())]) for row in rows(args.task)]
    if args.json:
        print(json.dumps([{**asdict(row), "command": row.command, "results": found} for row, found in lines], indent=1))
        return
    show([cells(row, found) for row, found in lines])


def cells(row, results):
    ours = [", ".join(figures.of_result(row, result)) + f" ({figures.budget(result)[0]})" for result in results]
    document = ", ".join(figures.of_row(row)) + (f" ({row.source})" if row.source else "")
    return row.name, document, "\n".join(ours) or "not run", row.command


def show(table):
    """On the screen, with rich where it is installed."""
    try:
        from rich.console import Console
        from rich.table import Table
    except ImportError:
        print("\n\n".join("\n  ".join(line) for line in table))
        return
    shown = Table(*HEAD, show_lines=True)
    shown.columns[0].no_wrap = True
    for line in table:
        shown.add_row(*line)
    # Into a file or a pipe as wide as need be, instead of folded at 80 columns.
    Console(width=None if sys.stdout.isatty() else max(200, shutil.get_terminal_size().columns)).print(shown)
