"""`fusedseq grid TASK`: trains and evaluates every configuration of a documented table, and makes our table of it."""

import csv
import json
import sys
from dataclasses import fields
from pathlib import Path

from fusedseq.tasks.catalog import TASKS, task_module
from fusedseq.tasks.lock import locked
from fusedseq.tasks.rows import ROWS
from fusedseq.tasks.run import Recipe, carry_out
from fusedseq.tasks.studies import grid_plots
from fusedseq.tasks.studies.table import show, write_csv, write_markdown
from fusedseq.tasks.train import add_common_arguments, usable_device
from fusedseq.tasks.training import TrainingError, full_key, override, varied
from fusedseq.tasks.training.trainer import RESULT

NOTE = """The losses are those of the epoch with the lowest validation loss, whose weights are judged; the document has
its own after 10 epochs. BLEU is NLTK's of sentences, averaged over the test split, of greedy translations."""


def add_arguments(parser):
    parser.description = (
        "Trains every configuration of a task's documented table, one after the other, each in a directory of its own, and evaluates "
        "it. Stopped or killed, the same command goes on; the same command in other processes with the same --out takes the "
        "configurations that none is at."
    )
    add = parser.add_argument
    add_common_arguments(parser)
    add("--only", nargs="+", metavar="NAME", help="these configurations alone; an unknown one lists the known")
    add("--epochs", type=int, help="of each (default: the document's)")
    add("--set", action="append", default=[], metavar="KEY=VALUE", dest="assignments",
        help="a setting that all configurations have, e.g. data.batch=64 (repeatable; an unknown key lists the known)")  # fmt: skip
    add("--seed", type=int, default=0, help="one seed, the same losses (default: %(default)s)")
    add("--out", metavar="DIR", type=Path, help="for runs, tables and plots (default: runs/TASK/grid)")


def run(args):
    grid, varying = _grid(args)
    chosen = args.only or [*grid]
    if unknown := [name for name in chosen if name not in grid]:
        raise ValueError(f"--only: unknown configuration {unknown[0]!r}; known are {', '.join(grid)}")
    out = args.out or Path("runs") / args.task / "grid"
    out.mkdir(parents=True, exist_ok=True)
    device, failed = usable_device(args.device), {}
    for i, name in enumerate(chosen):
        print(f"\n{i + 1} of {len(chosen)}: {name}", flush=True)
        recipe = Recipe(args.task, name, grid[name], args.seed, args.ops or "fused", args.data, device)
        try:
            if carry_out(recipe, out / name) is None:
                print(f"another process is at it, in {out / name}", flush=True)
        except TrainingError as error:
            print(f"fusedseq grid: {name}: {error}", file=sys.stderr)
            if isinstance(error.__cause__, OSError):  # a full disk is so for all
                break
            failed[name] = str(error)
        except KeyboardInterrupt:
            print("interrupted: the same command goes on from here", flush=True)
            _report(args, grid, varying, out)
            return 130
    _report(args, grid, varying, out)
    return 1 if failed else 0


def _grid(args):
    """{name: settings}, and the keys in which they differ."""
    module = task_module(args.task)
    if not hasattr(module, "GRID"):
        raise ValueError(f"{args.task} has no documented table; those that have: "
                         f"{', '.join(name for name in TASKS if hasattr(task_module(name), 'GRID'))}")  # fmt: skip
    varying = _varying(module.GRID.values())
    for assignment in args.assignments:
        if (key := full_key(module.BASE, assignment.partition("=")[0])) in varying:
            raise ValueError(f"--set: {key} is what the configurations differ in; choose among them by --only")
    limits = {} if args.epochs is None else {"epochs": args.epochs}
    return {name: varied(override(s, args.assignments), training=limits) for name, s in module.GRID.items()}, varying


def _value(settings, key):
    section, name = key.split(".")
    return getattr(getattr(settings, section), name)


def _varying(configurations):
    """The keys in which they differ, in the order of the table: what changes latest is first."""
    first, *others = configurations
    keys = [
        f"{section.name}.{field.name}" for section in fields(first) for field in fields(getattr(first, section.name))
    ]
    changes = {
        key: next((i for i, c in enumerate(others) if _value(c, key) != _value(first, key)), None) for key in keys
    }
    return sorted((key for key in keys if changes[key] is not None), key=changes.get, reverse=True)


def _report(args, grid, varying, out):
    """Of all that are finished, by whomever."""
    curves, rows = {}, []
    for name, settings in grid.items():
        curve = _curve(out / name / "epochs.csv")
        if curve:
            curves[name] = curve
        figures = _figures(out / name, curve)
        theirs = {f"document {key}": value for key, value in ROWS[f"{args.task}/{name}"].figures.items()}
        rows.append({"name": name, **{key: _value(settings, key) for key in varying}, **figures, **theirs})
    finished = sum("epochs" in row for row in rows)
    with locked(out / ".lock"):
        write_csv(out / "table.csv", rows)
        write_markdown(out / "table.md", rows, NOTE)
        try:
            grid_plots.losses(out / "losses.png", curves)
            grid_plots.bars(out / "bleu.png", rows, varying)
        except ImportError as error:
            print(f"no plots: they need the Python package {error.name} (pip install {error.name})")
    show(rows, f"{args.task}: {finished} of {len(rows)} configurations are finished")
    print(f"in {out}: table.csv, table.md, losses.png, bleu.png", flush=True)


def _curve(path):
    """The rows of epochs.csv that are whole."""
    if not path.exists():
        return []
    with path.open(newline="") as file:
        return [row for row in csv.DictReader(file) if None not in row.values()]


def _figures(out, curve):
    if not (out / RESULT).exists():
        return {}
    result = json.loads((out / RESULT).read_text())
    best: dict = min(curve, key=lambda row: float(row["valid_loss"]), default={})
    return {
        "train loss": float(best["train_loss"]) if best else None, "valid loss": result["valid"]["loss"], "test bleu": result["test"].get("bleu"),
        "test sacrebleu": result["test"].get("sacrebleu"), "epochs": result["epochs"],
        "seconds": result["seconds"],
    }  # fmt: skip
