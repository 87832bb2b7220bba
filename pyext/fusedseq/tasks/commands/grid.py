"""`fusedseq grid TASK`: trains and evaluates every configuration of a documented table."""

import argparse
import sys
from collections.abc import Iterable
from dataclasses import fields
from pathlib import Path
from typing import Any

from fusedseq.tasks.catalog import TASKS, task_module
from fusedseq.tasks.commands.arguments import (
    add_common_arguments,
    add_seed_argument,
    add_set_argument,
    check_operators,
    check_out,
    directory,
    usable_device,
)
from fusedseq.tasks.runs.run import Recipe, carry_out
from fusedseq.tasks.studies.grid_report import setting, write
from fusedseq.tasks.training import TrainingError, full_key, override, varied


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of the command."""
    parser.description = (
        "Trains and evaluates every configuration of a task's documented table, one after the "
        "other, each in its own directory. If the command is stopped or killed, the same command "
        "continues. The same command in other processes with the same --out trains the "
        "configurations that no other process is training."
    )
    add_common_arguments(parser, default_operators="fused")
    add = parser.add_argument
    add(
        "--only",
        nargs="+",
        metavar="NAME",
        help="only these configurations; an unknown name lists the known ones",
    )
    add(
        "--epochs",
        type=int,
        help="passes over the data for each configuration (default: as documented)",
    )
    add_set_argument(
        parser,
        "a setting of all configurations, e.g. data.batch=64 (repeatable; an unknown key lists "
        "the known)",
    )
    add_seed_argument(parser, "equal seeds give equal losses (default: %(default)s)")
    add(
        "--out",
        metavar="DIR",
        type=directory,
        help="the directory of runs, tables and plots (default: runs/TASK/grid)",
    )


def run(args: argparse.Namespace) -> int:
    """Runs the command. Returns 0; 1 where a configuration failed; 130 after a signal."""
    check_operators(args.task, args.ops)
    grid, varying = _grid(args)
    chosen = args.only or [*grid]
    if unknown := [name for name in chosen if name not in grid]:
        raise ValueError(
            f"--only: unknown configuration {unknown[0]!r}; known are {', '.join(grid)}"
        )
    out = args.out or Path("runs") / args.task / "grid"
    check_out(out)
    out.mkdir(parents=True, exist_ok=True)
    device, failed = usable_device(args.device), False
    for i, name in enumerate(chosen):
        print(f"\n{i + 1} of {len(chosen)}: {name}", flush=True)
        ops = args.ops or "fused"
        recipe = Recipe(args.task, name, grid[name], args.seed, ops, args.data, device)
        try:
            if carry_out(recipe, out / name) is None:
                print(f"another process is training it, in {out / name}", flush=True)
        except TrainingError as error:
            print(f"fusedseq grid: {name}: {error}", file=sys.stderr)
            failed = True
            if isinstance(error.__cause__, OSError):  # a full disk fails every configuration
                break
        except KeyboardInterrupt:
            print("interrupted: the same command continues", flush=True)
            write(args.task, grid, varying, out)
            return 130
    write(args.task, grid, varying, out)
    return 1 if failed else 0


def _grid(args: argparse.Namespace) -> tuple[dict[str, Any], list[str]]:
    """{name: settings} of the configurations, and the keys in which they differ."""
    module = task_module(args.task)
    if not hasattr(module, "GRID"):
        with_grid = [name for name in TASKS if hasattr(task_module(name), "GRID")]
        raise ValueError(
            f"{args.task} has no documented table; tasks that have one: {', '.join(with_grid)}"
        )
    varying = _varying(module.GRID.values())
    for assignment in args.assignments:
        if (key := full_key(module.BASE, assignment.partition("=")[0])) in varying:
            raise ValueError(
                f"--set: the configurations differ in {key}; choose among them with --only"
            )
    limits = {} if args.epochs is None else {"epochs": args.epochs}
    grid = {
        name: varied(override(settings, args.assignments), training=limits)
        for name, settings in module.GRID.items()
    }
    return grid, varying


def _varying(configurations: Iterable[Any]) -> list[str]:
    """The keys in which configurations differ; the key that changes last in the table is first."""
    first, *others = configurations
    keys = [
        f"{section.name}.{field.name}"
        for section in fields(first)
        for field in fields(getattr(first, section.name))
    ]
    changed_at = {}
    for key in keys:
        for i, other in enumerate(others):
            if setting(other, key) != setting(first, key):
                changed_at[key] = i
                break
    return sorted(changed_at, key=changed_at.__getitem__, reverse=True)
