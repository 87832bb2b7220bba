"""Tables, given as lists of dicts: on the terminal, as CSV, as Markdown."""

import csv
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from fusedseq.data.escapes import escaped
from fusedseq.tasks.training.files import replaced

Rows = Sequence[dict[str, Any]]


def columns(rows: Rows) -> list[str]:
    """The keys of all rows, in the order of the row with the most keys."""
    return [*dict.fromkeys(key for row in sorted(rows, key=len, reverse=True) for key in row)]


def text(value: Any) -> str:
    """A cell: floats with four digits, None as an empty text, no control characters."""
    if value is None:
        return ""
    return f"{value:.4g}" if isinstance(value, float) else escaped(str(value))


def _texts(rows: Rows) -> tuple[list[str], list[list[str]]]:
    """The headings and the cells, without columns that are empty."""
    names = [name for name in columns(rows) if any(row.get(name) not in (None, "") for row in rows)]
    heads = [name.rpartition(".")[2].replace("_", " ") for name in names]
    return heads, [[text(row.get(n)) for n in names] for row in rows]


def show(rows: Rows, title: str, bold: Callable[[dict], bool] = lambda row: False) -> None:
    """Prints a table; without rich, with tabs between the columns. bold: which rows are bold"""
    heads, lines = _texts(rows)
    try:
        from rich.console import Console
        from rich.table import Table
    except ImportError:
        print("\n".join("\t".join(line) for line in ([title], heads, *lines)))
        return
    table = Table(*heads, title=title)
    for row, line in zip(rows, lines, strict=True):
        table.add_row(*line, style="bold" if bold(row) else None)
    Console(width=None if sys.stdout.isatty() else 250).print(table)


def write_csv(path: Path, rows: Rows) -> None:
    """Writes a table as CSV."""
    with replaced(path) as file:
        table = csv.DictWriter(file, columns(rows), lineterminator="\n")
        table.writeheader()
        table.writerows(rows)


def write_markdown(path: Path, rows: Rows, note: str) -> None:
    """Writes a table as Markdown. note: a paragraph below it"""
    heads, lines = _texts(rows)
    with replaced(path) as file:
        for line in (heads, ["---"] * len(heads), *lines):
            file.write("| " + " | ".join(line) + " |\n")
        file.write(f"\n{note}\n")
