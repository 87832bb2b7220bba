"""Rows, dicts, as a table: on the terminal, as CSV, as Markdown."""

import csv
import os
import sys
from contextlib import contextmanager


def columns(rows):
    """The keys, in the order of the row with most."""
    return [*dict.fromkeys(key for row in sorted(rows, key=len, reverse=True) for key in row)]


def text(value):
    if value is None:
        return ""
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _texts(rows):
    """Heads and lines, without columns that are empty."""
    names = [name for name in columns(rows) if any(row.get(name) not in (None, "") for row in rows)]
    return [name.rpartition(".")[2].replace("_", " ") for name in names], [
        [text(row.get(n)) for n in names] for row in rows
    ]


def show(rows, title, bold=lambda row: False):
    """On the terminal; without rich, with tabs between columns. bold: which rows stand out"""
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


def write_csv(path, rows):
    with _replaced(path) as file:
        table = csv.DictWriter(file, columns(rows), lineterminator="\n")
        table.writeheader()
        table.writerows(rows)


def write_markdown(path, rows, note):
    heads, lines = _texts(rows)
    with _replaced(path) as file:
        for line in (heads, ["---"] * len(heads), *lines):
            file.write("| " + " | ".join(line) + " |\n")
        file.write(f"\n{note}\n")


@contextmanager
def _replaced(path):
    """The file is whole or the old one, as several processes may write it."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    with temporary.open("w", newline="", encoding="utf-8") as file:
        yield file
    os.replace(temporary, path)
