"""`fusedseq list`: every experiment with its reported metrics, ours, and its command."""

import argparse
import json
import shutil
import sys
from collections.abc import Sequence
from typing import Any

from fusedseq.data.escapes import escaped
from fusedseq.tasks.catalog import TASKS
from fusedseq.tasks.experiments import metrics, results
from fusedseq.tasks.experiments.documented import experiments
from fusedseq.tasks.experiments.experiment import Experiment

HEAD = ("experiment", "reported", "ours", "command")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of the command."""
    add = parser.add_argument
    add("task", nargs="?", choices=TASKS, help="only the experiments of this task (default: all)")
    add(
        "--runs",
        metavar="DIR",
        action="append",
        default=[],
        help="also show the finished runs in this directory, beside the results that the package "
        "carries (repeatable)",
    )
    add("--json", action="store_true", help="print JSON instead of a table")


def run(args: argparse.Namespace) -> None:
    """Runs the command."""
    sources = [results.carried(), *map(results.under, args.runs)]
    found = [
        (experiment, [r for source in sources for r in source.get(experiment.name, ())])
        for experiment in experiments(args.task)
    ]
    if args.json:
        print(json.dumps([as_json(*pair) for pair in found], indent=1))
        return
    show([cells(*pair) for pair in found])


def as_json(experiment: Experiment, found: list[dict]) -> dict[str, Any]:
    """An experiment with its results; the keys are those of the first version of this command."""
    return {
        "name": experiment.name,
        "source": experiment.source,
        "figures": experiment.metrics,
        "said": experiment.remark,
        "run": experiment.run,
        "command": experiment.command,
        "results": found,
    }


def cells(experiment: Experiment, found: list[dict]) -> tuple[str, str, str, str]:
    """The cells of an experiment, under HEAD."""
    ours = [
        ", ".join(metrics.of_result(experiment, result)) + f" ({metrics.budget(result)[0]})"
        for result in found
    ]
    source = f" ({experiment.source})" if experiment.source else ""
    reported = ", ".join(metrics.of_experiment(experiment)) + source
    return experiment.name, reported, "\n".join(ours) or "not run", experiment.command


def show(table: Sequence[Sequence[str]]) -> None:
    """Prints the table, with rich if that is installed."""
    table = [[escaped(cell) for cell in line] for line in table]
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
    # A file or a pipe receives wide lines instead of lines folded at 80 columns.
    wide = max(200, shutil.get_terminal_size().columns)
    Console(width=None if sys.stdout.isatty() else wide).print(shown)
