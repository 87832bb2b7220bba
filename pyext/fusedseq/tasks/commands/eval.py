"""`fusedseq eval TASK CHECKPOINT`: the metrics of a trained model on its task's splits."""

import argparse
import importlib
import json
from collections.abc import Iterable
from pathlib import Path
from types import ModuleType

from fusedseq.tasks.catalog import operators, task_module
from fusedseq.tasks.commands.arguments import (
    add_common_arguments,
    check_operators,
    named_options,
    split_names,
    usable_device,
)
from fusedseq.tasks.evaluation import ensemble
from fusedseq.tasks.runs.restore import checkpoint_file, load_run
from fusedseq.tasks.runs.run import metrics_line
from fusedseq.tasks.training import CheckpointError, from_dict
from fusedseq.tasks.training.files import finite

# Modules that add metrics to a task's own, on request. Each has TASKS, OPTIONS (the names of its
# options, None where not given), add_arguments(group), check(settings, splits, args), which raises
# ValueError or OSError before anything is evaluated, and metrics(task, splits, args).
EXTENSIONS = (
    "fusedseq.tasks.evaluation.text_options",
    "fusedseq.tasks.evaluation.translation_options",
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of the command."""
    add_common_arguments(parser, default_operators="fused")
    add = parser.add_argument
    add("checkpoint", type=Path, help="a run's directory (its best.safetensors), or a checkpoint")
    add(
        "others",
        nargs="*",
        type=Path,
        metavar="checkpoint",
        help="more checkpoints of words: evaluates their ensemble, by vote and by average",
    )
    add(
        "--splits",
        default="valid,test",
        help="splits to evaluate, separated by commas (default: %(default)s)",
    )
    add("--json", action="store_true", help="print JSON instead of lines")
    for module in map(importlib.import_module, EXTENSIONS):
        group = parser.add_argument_group(f"options for {' and '.join(module.TASKS)}")
        module.add_arguments(group)


def run(args: argparse.Namespace) -> None:
    """Runs the command."""
    check_operators(args.task, args.ops)
    extensions = requested(args)
    results, lines = of_ensemble(args) if args.others else of_one(args, extensions)
    print(json.dumps(finite(results)) if args.json else "\n".join(lines))


def of_one(
    args: argparse.Namespace, extensions: Iterable[ModuleType]
) -> tuple[dict, Iterable[str]]:
    """{split: metrics} of a checkpoint, and the same as lines of text.

    Errors: CheckpointError for a checkpoint of another task, ValueError for an unknown split
    """
    path = checkpoint_file(args.checkpoint)
    state = load_run(path)
    description = state["description"]
    if description["task"] != args.task:
        raise CheckpointError(f"{path} holds a model of {description['task']}, not of {args.task}")
    module = task_module(args.task)
    settings = from_dict(module.Settings, description["settings"])
    for extension in extensions:
        with named_options(extension.OPTIONS):
            extension.check(settings, args.splits.split(","), args)
    task = module.build(
        settings,
        args.data,
        ops=operators(args.ops or "fused"),
        seed=description["seed"],
        device=usable_device(args.device),
        description=description,
    )
    splits = split_names(args.splits, task.splits)
    task.model.load_state_dict(state["model"])
    task.model.eval()
    results = {split: task.evaluate(split) for split in splits}
    for extension in extensions:
        with named_options(extension.OPTIONS):
            found = extension.metrics(task, splits, args)
        for split, metrics in found.items():
            results[split] |= metrics
    return results, [f"{split}: {metrics_line(metrics)}" for split, metrics in results.items()]


def of_ensemble(args: argparse.Namespace) -> tuple[dict, Iterable[str]]:
    """The metrics of several checkpoints and of their ensemble, and the same as lines of text."""
    if args.task != "words":
        raise ValueError(
            f"several checkpoints form an ensemble, which requires the task words, got {args.task}"
        )
    splits = split_names(args.splits, ensemble.Ensemble.splits)
    paths = [args.checkpoint, *args.others]
    models = ensemble.ensemble(
        paths, args.data, ops=args.ops or "fused", device=usable_device(args.device)
    )
    results = ensemble.metrics(models, splits)
    return results, ensemble.lines(paths, results)


def requested(args: argparse.Namespace) -> list[ModuleType]:
    """The EXTENSIONS of which an option is given.

    Errors: ValueError where the option does not apply to the task
    """
    found = []
    for module in map(importlib.import_module, EXTENSIONS):
        given = [name for name in module.OPTIONS if getattr(args, name) is not None]
        if given and args.task not in module.TASKS:
            raise ValueError(
                f"--{given[0].replace('_', '-')} applies to {' and '.join(module.TASKS)}, "
                f"not to {args.task}"
            )
        found += [module] if given else []
    return found
