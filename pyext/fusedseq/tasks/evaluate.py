"""`fusedseq eval TASK CHECKPOINT`: the figures of a trained model on its task's splits."""

import json
from pathlib import Path

from fusedseq.tasks.catalog import operators, task_module
from fusedseq.tasks.train import add_common_arguments, usable_device
from fusedseq.tasks.training import CheckpointError, from_dict, load_checkpoint
from fusedseq.tasks.training.trainer import BEST


def add_arguments(parser):
    add_common_arguments(parser)
    parser.add_argument("checkpoint", type=Path, help="a run's directory (its best.safetensors), or a checkpoint")
    parser.add_argument("--splits", default="valid,test", help="(default: %(default)s)")
    parser.add_argument("--json", action="store_true", help="print JSON instead of lines")


def run(args):
    path = args.checkpoint / BEST if args.checkpoint.is_dir() else args.checkpoint
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
    if args.json:
        print(json.dumps(results))
        return
    for split, figures in results.items():
        print(f"{split}: " + ", ".join(f"{name} {value:.6g}" for name, value in figures.items()))
