"""`fusedseq eval TASK CHECKPOINT`: the figures of a trained model on its task's splits."""

import importlib
import json
from pathlib import Path

from fusedseq.tasks import ensemble
from fusedseq.tasks.catalog import operators, task_module
from fusedseq.tasks.restored import checkpoint_file
from fusedseq.tasks.run import told
from fusedseq.tasks.train import add_common_arguments, usable_device
from fusedseq.tasks.training import CheckpointError, from_dict, load_checkpoint

# What there is to ask for beyond a task's own figures: modules with TASKS, OPTIONS (their names, None where not given),
# add_arguments(group) and figures(task, splits, args) -> {split: figures}
MORE = [f"fusedseq.tasks.{name}" for name in ("evaluate_text", "evaluate_translations")]


def add_arguments(parser):
    add_common_arguments(parser)
    parser.add_argument("checkpoint", type=Path, help="a run's directory (its best.safetensors), or a checkpoint")
    parser.add_argument("others", nargs="*", type=Path, metavar="checkpoint",
                        help="more of them (words): their ensemble, by vote and by average")  # fmt: skip
    parser.add_argument("--splits", default="valid,test", help="(default: %(default)s)")
    parser.add_argument("--json", action="store_true", help="print JSON instead of lines")
    for module in map(importlib.import_module, MORE):
        module.add_arguments(parser.add_argument_group(f"of {' and '.join(module.TASKS)}"))


def run(args):
    more = asked_for(args)
    results, told_as = of_ensemble(args) if args.others else of_one(args, more)
    print(json.dumps(results) if args.json else "\n".join(told_as))


def of_one(args, more):
    """{split: figures} of a checkpoint, and the lines that say so. more: modules of MORE"""
    path = checkpoint_file(args.checkpoint)
    state = load_checkpoint(path)
    description = state["description"]
    if description["task"] != args.task:
        raise CheckpointError(f"{path} holds a model of {description['task']}, not of {args.task}")
    module = task_module(args.task)
    settings = from_dict(module.Settings, description["settings"])
    task = module.build(settings, args.data, ops=operators(args.ops or "fused"), seed=description["seed"],
                        device=usable_device(args.device), description=description)  # fmt: skip
    splits = args.splits.split(",")
    if unknown := set(splits) - {*task.splits}:
        raise ValueError(f"--splits: unknown split {unknown.pop()!r}; known are {', '.join(task.splits)}")
    task.model.load_state_dict(state["model"])
    task.model.eval()
    results = {split: task.evaluate(split) for split in splits}
    for module in more:
        for split, figures in module.figures(task, splits, args).items():
            results[split] |= figures
    return results, [f"{split}: {told(figures)}" for split, figures in results.items()]


def of_ensemble(args):
    """The same of several checkpoints, and of their ensemble."""
    if args.task != "words":
        raise ValueError(f"several checkpoints make an ensemble, which is of words, not of {args.task}")
    paths = [args.checkpoint, *args.others]
    found = ensemble.ensemble(paths, args.data, ops=args.ops or "fused", device=usable_device(args.device))
    results = ensemble.figures(found, args.splits.split(","))
    return results, ensemble.lines(paths, results)


def asked_for(args):
    """The modules of MORE of which an option is given."""
    found = []
    for module in map(importlib.import_module, MORE):
        given = [name for name in module.OPTIONS if getattr(args, name) is not None]
        if given and args.task not in module.TASKS:
            raise ValueError(f"--{given[0].replace('_', '-')} is of {' and '.join(module.TASKS)}, not of {args.task}")
        found += [module] if given else []
    return found
