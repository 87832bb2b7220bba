"""`fusedseq ensemble words`: trains the members of an ensemble and evaluates it.

Members that are already trained are not trained again.
"""

import argparse
import shlex
from pathlib import Path
from types import ModuleType
from typing import Any

from fusedseq.tasks.catalog import preset_operators, task_module, task_operators
from fusedseq.tasks.commands.arguments import (
    add_common_arguments,
    add_seed_argument,
    add_set_argument,
    check_out,
    directory,
    given,
    split_names,
    usable_device,
)
from fusedseq.tasks.evaluation.ensemble import AVERAGE, VOTE, ensemble, lines, metrics
from fusedseq.tasks.runs.initial_weights import trained_before
from fusedseq.tasks.runs.run import Recipe, carry_out
from fusedseq.tasks.training import override
from fusedseq.tasks.training.files import write_json

ENSEMBLES = ("words",)  # the tasks that have an ENSEMBLE


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of the command."""
    add_common_arguments(parser, tasks=ENSEMBLES, operators=task_operators("words"))
    add = parser.add_argument
    add(
        "--members",
        type=given,
        metavar="PRESET,PRESET,...",
        help="the presets to train (default: six like those of the source report)",
    )
    add_set_argument(parser, "change a setting of all members (repeatable)")
    add_seed_argument(
        parser, "of the first member; the next members have the following seeds (default: 0)"
    )
    add("--epochs", type=int, help="train each member for this many passes over the data")
    add("--steps", type=int, help="train each member for this many steps in total")
    add(
        "--out",
        metavar="DIR",
        type=directory,
        help="a directory for the members' directories (default: runs/words/ensemble-SEED)",
    )
    add(
        "--splits",
        default="valid,test,news_valid,news_test",
        help="splits to evaluate, separated by commas (default: %(default)s)",
    )


def run(args: argparse.Namespace) -> int:
    """Runs the command. Returns 0; 130 after a signal."""
    try:
        _run(args)
    except KeyboardInterrupt:
        print("interrupted: the same command continues", flush=True)
        return 130
    return 0


def _run(args: argparse.Namespace) -> None:
    module = task_module(args.task)
    splits = split_names(args.splits, module.Task.splits)
    out = args.out or Path("runs") / args.task / f"ensemble-{args.seed}"
    check_out(out)
    members = args.members.split(",") if args.members else module.ENSEMBLE
    if args.seed + len(members) > 2**64:
        raise ValueError(
            f"--seed must leave a seed below 2**64 for each of the {len(members)} members, got "
            f"{args.seed}"
        )
    recipes = [recipe(args, module, preset, args.seed + i) for i, preset in enumerate(members)]
    folders = [out / f"{i + 1}-{r.preset}" for i, r in enumerate(recipes)]
    results_of = [carry_out(r, folder) for r, folder in zip(recipes, folders, strict=True)]
    trained = [result for result in results_of if result is not None]
    if len(trained) < len(members):
        raise ValueError(
            f"another process is training {folders[results_of.index(None)]}: "
            "run this command again when it has ended"
        )
    models = ensemble(
        folders, args.data, ops=args.ops or "fused", device=usable_device(args.device)
    )
    results = metrics(models, splits)
    print("\n".join(lines(folders, results)))
    write_json(out / "result.json", result(args, trained, results))


def recipe(args: argparse.Namespace, module: ModuleType, preset: str, seed: int) -> Recipe:
    """The Recipe of a member. Errors: ValueError for an unknown preset"""
    if preset not in module.PRESETS:
        raise ValueError(
            f"{args.task}: unknown preset {preset!r}; known are {', '.join(module.PRESETS)}"
        )
    limits = [
        f"training.{name}={getattr(args, name)}"
        for name in ("epochs", "steps")
        if getattr(args, name) is not None
    ]
    settings = override(module.PRESETS[preset], [*args.assignments, *limits])
    ops = args.ops or preset_operators(module, preset)
    start = trained_before(None, module, f"{args.task}/{preset}", seed)
    return Recipe(
        args.task, preset, settings, seed, ops, args.data, usable_device(args.device), start
    )


def result(args: argparse.Namespace, members: list[dict], results: dict) -> dict[str, Any]:
    """The content of the ensemble's result.json: that of the first member, with the metrics of the
    ensemble on the splits in `results`."""
    options = ("members", "seed", "epochs", "steps", "ops")
    given = {name: value for name in options if (value := getattr(args, name)) is not None}
    given = {name: value for name, value in given.items() if (name, value) != ("seed", 0)}
    words = [word for name, value in given.items() for word in (f"--{name}", str(value))]
    words += [word for text in args.assignments for word in ("--set", text)]
    splits = {
        split: part[AVERAGE] | {"vote_accuracy": part[VOTE]["accuracy"]}
        for split, part in results.items()
    }
    known = task_module(args.task).Task.splits
    shared = {key: value for key, value in members[0].items() if key not in known}
    return shared | {
        "preset": "ensemble",
        "command": shlex.join(["fusedseq", "ensemble", "words", *words]),
        **splits,
        **{name: sum(member[name] for member in members) for name in ("seconds", "parameters")},
        "members": [
            {
                "command": member["command"],
                **{split: part["members"][i] for split, part in results.items()},
            }
            for i, member in enumerate(members)
        ],
    }
