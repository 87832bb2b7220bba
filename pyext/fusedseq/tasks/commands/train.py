"""`fusedseq train TASK`: trains a preset of a task, with fused or reference operators."""

import argparse
import shlex
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

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
from fusedseq.tasks.runs.initial_weights import trained_before
from fusedseq.tasks.runs.restore import load_run
from fusedseq.tasks.runs.run import Recipe, begin, plot_curves, report
from fusedseq.tasks.training import CheckpointError, TrainingError, from_dict, override
from fusedseq.tasks.training.lock import run_directory
from fusedseq.tasks.training.processes import Processes, own_device, started
from fusedseq.tasks.training.trainer import BEST, LAST, RESULT


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of the command."""
    add_common_arguments(parser)
    add = parser.add_argument
    add(
        "--preset",
        type=given,
        help="a documented configuration; an unknown name lists the known ones",
    )
    add_set_argument(
        parser,
        "change a setting, e.g. model.hidden=1150 (repeatable; an unknown key lists the known)",
    )
    add_seed_argument(parser, "equal seeds give equal losses (default: 0)", default=None)
    add("--epochs", type=int, help="train for this many passes over the data")
    add("--steps", type=int, help="train for this many steps in total")
    add(
        "--out",
        metavar="DIR",
        type=directory,
        help="the run's directory (default: runs/TASK/PRESET-SEED)",
    )
    add(
        "--from",
        metavar="RUN",
        type=Path,
        dest="start",
        help="start from the weights of another run: its directory, or a checkpoint",
    )
    add(
        "--resume", action="store_true", help="continue the run in --out exactly where it was saved"
    )
    add(
        "--compile",
        action="store_true",
        help="use torch.compile for training steps: takes minutes to start and needs a C++ "
        "compiler; the losses are the same up to rounding and dropout masks",
    )
    add("--skip-test", action="store_true", help="do not evaluate the test set at the end")


def run(args: argparse.Namespace) -> int:
    """Runs the command. Returns 0; 1 where training cannot continue; 130 after a signal."""
    try:
        with started() as processes:
            return _run(args, processes)
    except TrainingError as error:
        print(f"fusedseq train: {error}", file=sys.stderr)
        return 1


def _run(args: argparse.Namespace, processes: Processes) -> int:
    module = task_module(args.task)
    check_operators(args.task, args.ops)
    if args.resume:
        _check_resumable(args)
    name = f"{args.preset or module.DEFAULT_PRESET}-{args.seed or 0}"
    out = args.out or Path("runs") / args.task / name
    check_out(out)
    # Before the checkpoint is read, so that no other process writes a newer one.
    with run_directory(out, processes):
        return _train(args, module, out, processes)


def _train(args: argparse.Namespace, module: ModuleType, out: Path, processes: Processes) -> int:
    """Trains in directory `out`, which is locked."""
    saved = _saved(args, out)
    settings, seed, preset = _settings(args, module, saved)
    ops = args.ops or (saved["label"]["ops"] if saved else preset_operators(module, preset))
    start = (
        args.start if saved else trained_before(args.start, module, f"{args.task}/{preset}", seed)
    )
    device = usable_device(own_device(args.device))
    if device.type == "cuda" and device.index is not None:
        torch.cuda.set_device(device)  # so that this process allocates nothing on other GPUs
    recipe = Recipe(args.task, preset, settings, seed, ops, args.data, device, start)
    trainer = begin(
        recipe, out, saved, processes=processes, compile="inductor" if args.compile else None
    )
    try:
        why = trainer.fit()
        if processes.first:
            print(f"ended ({why}) at step {trainer.step}", flush=True)
            plot_curves(out)
        if processes.first and why != "interrupted":
            report(trainer, why, args.skip_test, args.data)
    except KeyboardInterrupt:  # a second signal, or one during the evaluation
        why = "interrupted"
    if why != "interrupted":
        return 0
    if processes.first:
        print(f"to go on: {continuation(args, out, processes.count)}", flush=True)
    return 130


def continuation(args: argparse.Namespace, out: Path, processes: int = 1) -> str:
    """The command that continues a run; its settings are in its checkpoint."""
    words = ["fusedseq"]
    if processes > 1:
        words = ["torchrun", "--nproc-per-node", str(processes), "-m", *words]
    words += ["train", args.task]
    words += ["--data", args.data] if args.data else []
    words += ["--out", str(out), "--resume"]
    for name in ("epochs", "steps"):
        if getattr(args, name) is not None:
            words += [f"--{name}", str(getattr(args, name))]
    words += [name for name in ("--compile", "--skip-test") if getattr(args, option(name))]
    words += ["--device", args.device]  # another device computes other bits
    return shlex.join(words)


def option(name: str) -> str:
    """The attribute of an option, such as skip_test of --skip-test."""
    return name.removeprefix("--").replace("-", "_")


def _check_resumable(args: argparse.Namespace) -> None:
    if args.out is None:
        raise ValueError("--resume requires the run's directory: --out DIR")
    if not args.out.is_dir():
        raise CheckpointError(f"--resume: {args.out} is not a directory")


def _saved(args: argparse.Namespace, out: Path) -> dict | None:
    """The checkpoint to resume from; None for a new run, or one killed before it wrote one.

    Errors: ValueError where a new run would replace another one in `out`, and where nothing says
        how to start the run that was killed
    """
    if (out / LAST).exists():
        if args.resume:
            return load_run(out / LAST, to_resume=True)
        raise ValueError(
            f"{out} already holds a run: give --resume to continue it, or another --out"
        )
    for name in (BEST, RESULT):
        if (out / name).exists():
            raise ValueError(
                f"{out} already holds a run: it has {name}, but no {LAST} to continue the run "
                "from; give another --out"
            )
    if args.resume:
        if args.preset is None and not args.assignments:
            raise ValueError(
                f"--resume: there is no checkpoint in {out}: start the run with --preset or --set, "
                "or give the directory of another run"
            )
        print(f"no checkpoint in {out} yet: training starts from step 0", flush=True)
    return None


def _settings(
    args: argparse.Namespace, module: ModuleType, saved: dict | None
) -> tuple[Any, int, str]:
    """The settings, the seed and the preset's name; for a resumed run those it was started with."""
    if saved is None:
        preset, seed = args.preset or module.DEFAULT_PRESET, args.seed or 0
        return with_changes(preset_settings(args.task, preset), args), seed, preset
    description = saved["description"]
    if args.task != description["task"]:
        raise ValueError(
            f"{args.out} was started with task {description['task']}, got {args.task}: the "
            "settings of a run cannot change"
        )
    settings = with_changes(from_dict(module.Settings, description["settings"]), args)
    seed = description["seed"] if args.seed is None else args.seed
    return settings, seed, args.preset or saved["label"]["preset"]


def with_changes(settings: Any, args: argparse.Namespace) -> Any:
    """The settings with --set, --epochs and --steps applied."""
    limits = [
        f"training.{name}={getattr(args, name)}"
        for name in ("epochs", "steps")
        if getattr(args, name) is not None
    ]
    return override(settings, [*args.assignments, *limits])
