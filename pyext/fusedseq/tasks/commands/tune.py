"""`fusedseq tune TASK`: searches the settings with the lowest validation loss, by short runs."""

import argparse
import json
import sys
from pathlib import Path
from typing import Any
from urllib.parse import quote

from fusedseq.tasks.catalog import preset_operators, preset_settings, task_module
from fusedseq.tasks.commands.arguments import (
    add_common_arguments,
    add_seed_argument,
    add_set_argument,
    check_operators,
    check_out,
    directory,
    given,
    usable_device,
)
from fusedseq.tasks.runs.run import Recipe
from fusedseq.tasks.training import TrainingError, as_dict, full_key, override


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of the command."""
    parser.description = (
        "Runs a task with different settings in short runs, the trials, to find those with the "
        "lowest validation loss (with Optuna). The results so far decide which settings are tried "
        "next, and a trial that is worse than the others were at the same epoch is pruned. If "
        "the command is stopped or killed, the same command continues the study. The same command "
        "in several processes, on several machines with one --storage, shares the work."
    )
    add_common_arguments(parser)
    add = parser.add_argument
    add(
        "--trials",
        type=int,
        metavar="N",
        default=30,
        help="trials of the study in total (default: %(default)s)",
    )
    add(
        "--epochs",
        type=int,
        metavar="N",
        default=10,
        help="passes over the data in a trial (default: %(default)s)",
    )
    add(
        "--space",
        action="append",
        default=[],
        metavar="KEY=VALUE,...",
        help="search these values of a setting, in place of the task's own values or in addition "
        "to its other settings, e.g. model.layers=1,2 (repeatable)",
    )
    add_set_argument(
        parser, "a setting of all trials (repeatable; an unknown key lists the known keys)"
    )
    add(
        "--preset",
        type=given,
        help="the preset of all other settings (default: the task's default preset)",
    )
    add_seed_argument(parser, "of the search and of every run (default: %(default)s)")
    add(
        "--study",
        default="tune",
        metavar="NAME",
        help="the study's name in the storage (default: %(default)s)",
    )
    add(
        "--storage",
        metavar="URL",
        help="where trials are stored: sqlite:///FILE, postgresql://..., mysql://..., or "
        "journal:///FILE, which may be on a network file system (default: study.db in --out)",
    )
    add(
        "--sampler",
        choices=("tpe", "random"),
        default="tpe",
        help="how settings are chosen (default: %(default)s)",
    )
    add(
        "--pruner",
        choices=("median", "halving", "none"),
        default="median",
        help="which trials are ended early: those worse than the median, or those outside the "
        "better half (default: %(default)s)",
    )
    add(
        "--then-train",
        action="store_true",
        help="train the best settings for the preset's own number of epochs, and evaluate the "
        "test set",
    )
    add(
        "--out",
        metavar="DIR",
        type=directory,
        help="the directory of runs, tables and plots (default: runs/TASK/STUDY)",
    )


def run(args: argparse.Namespace) -> int:
    """Runs the command. Returns 0; 1 where the study cannot continue; 130 after a signal."""
    try:
        return _run(args)
    except TrainingError as error:
        print(f"fusedseq tune: {error}", file=sys.stderr)
        return 1


def _run(args: argparse.Namespace) -> int:
    # Imported here because they need Optuna, which --help does not.
    from fusedseq.tasks.studies import study_report
    from fusedseq.tasks.studies.search import conclude, search
    from fusedseq.tasks.studies.storage import storing
    from fusedseq.tasks.studies.trials import Trials

    for name in ("trials", "epochs"):
        if getattr(args, name) < 1:
            raise ValueError(f"--{name} must be at least 1, got {getattr(args, name)}")
    if not args.study.replace("-", "").replace("_", "").isalnum():
        raise ValueError(f"--study must be of letters, digits, - and _, got {args.study!r}")
    check_operators(args.task, args.ops)
    recipe, space = _recipe(args)
    out = args.out or Path("runs") / args.task / args.study
    check_out(out)
    trials = Trials(
        args.storage or f"sqlite:///{quote(str(out))}/study.db",
        args.study,
        out,
        space,
        begun=_shared(recipe, space, args.epochs),
        seed=args.seed,
        sampler=args.sampler,
        pruner=args.pruner,
    )
    with storing(args.storage or ""):
        try:
            write = lambda: study_report.write_table(trials)  # noqa: E731
            search(trials, recipe, args.trials, args.epochs, write)
        except KeyboardInterrupt:
            print("interrupted: the same command continues the study", flush=True)
            study_report.write(trials)
            return 130
        study_report.write(trials)
        conclude(trials, recipe, args.then_train)
    return 0


def _recipe(args: argparse.Namespace) -> tuple[Recipe, dict[str, tuple]]:
    """What all trials share, and the search space {section.key: values}."""
    module = task_module(args.task)
    preset = args.preset or module.DEFAULT_PRESET
    settings = override(preset_settings(args.task, preset), args.assignments)
    space = {
        **getattr(module, "SPACE", {}),
        **dict(_choices(settings, text) for text in args.space),
    }
    if not space:
        raise ValueError(
            f"{args.task} has no search space of its own: give --space KEY=VALUE,VALUE,..."
        )
    if "training.epochs" in space:
        raise ValueError("--space: training.epochs is that of --epochs in every trial")
    for assignment in args.assignments:
        if (key := full_key(settings, assignment.partition("=")[0])) in space:
            raise ValueError(
                f"--set: {key} is searched; to search fewer of its values "
                f"give --space {key}=VALUE,..."
            )
    ops, device = args.ops or preset_operators(module, preset), usable_device(args.device)
    return Recipe(args.task, preset, settings, args.seed, ops, args.data, device), space


def _choices(settings: Any, text: str) -> tuple[str, tuple]:
    """The full key of a --space option, and its distinct values in the setting's type."""
    key, equals, values = text.partition("=")
    if not equals or not values:
        raise ValueError(f"--space must be key=value,value,..., got {text!r}")
    key = full_key(settings, key, "--space")
    section, name = key.split(".")
    found = [
        getattr(getattr(override(settings, [f"{key}={value}"]), section), name)
        for value in values.split(",")
    ]
    return key, tuple(dict.fromkeys(found))


def _shared(recipe: Recipe, space: dict[str, tuple], epochs: int) -> dict[str, Any]:
    """What all trials of a study must have in common, as JSON.

    --ops, --device and the directory of the data may differ, as they do not change the losses.
    """
    shared = {
        "task": recipe.task,
        "preset": recipe.preset,
        "--seed": recipe.seed,
        "--epochs": epochs,
        "--data synthetic": recipe.data == "synthetic",
    }
    settings = {
        f"{section}.{key}": value
        for section, part in as_dict(recipe.settings).items()
        for key, value in part.items()
        if f"{section}.{key}" not in space
    }
    spaces = {f"--space {key}": values for key, values in space.items()}
    return json.loads(json.dumps({**shared, **settings, **spaces}))
