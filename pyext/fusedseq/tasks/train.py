"""`fusedseq train TASK`: trains a preset of a task, with fused or reference operators."""

import sys
from dataclasses import replace
from pathlib import Path

import torch

from fusedseq.tasks.catalog import OPERATORS, TASKS, preset_operators, preset_settings, task_module
from fusedseq.tasks.run import Recipe, begin, plot_curves, report
from fusedseq.tasks.start import trained_before
from fusedseq.tasks.training import CheckpointError, TrainingError, from_dict, load_checkpoint, override
from fusedseq.tasks.training.processes import own_device, started
from fusedseq.tasks.training.trainer import LAST


def add_common_arguments(parser):
    parser.add_argument("task", choices=TASKS)
    parser.add_argument("--data", metavar="DIR", help="the data's directory, or 'synthetic' (default: $FUSEDSEQ_DATA)")
    parser.add_argument(
        "--ops", choices=OPERATORS, help="which operators (default: fused, or what the preset is about)"
    )
    add_device_argument(parser)


def add_device_argument(parser):
    parser.add_argument(
        "--device", default="cuda" if torch.cuda.is_available() else "cpu", help="(default: %(default)s)"
    )


def add_arguments(parser):
    add_common_arguments(parser)
    parser.add_argument("--preset", help="a documented configuration; an unknown one lists the known")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", dest="assignments",
                        help="override a setting, e.g. model.hidden=1150 (repeatable; an unknown key lists the known)")  # fmt: skip
    parser.add_argument("--seed", type=int, help="one seed, the same losses (default: 0)")
    parser.add_argument("--epochs", type=int, help="train so many passes over the data")
    parser.add_argument("--steps", type=int, help="train so many steps in all")
    parser.add_argument("--out", metavar="DIR", type=Path, help="the run's directory (default: runs/TASK/PRESET-SEED)")
    parser.add_argument("--from", metavar="RUN", type=Path, dest="start",
                        help="begin with the weights of another run: its directory, or a checkpoint")  # fmt: skip
    parser.add_argument("--resume", action="store_true", help="continue the run in --out exactly where it was saved")
    parser.add_argument("--compile", action="store_true",
                        help="torch.compile the model where it trains: minutes to start, the same losses but for rounding "
                             "and dropout's masks; needs a C++ compiler")  # fmt: skip
    parser.add_argument("--skip-test", action="store_true", help="do not evaluate the test set at the end")


def run(args):
    try:
        with started() as processes:
            return _run(args, processes)
    except TrainingError as error:
        print(f"fusedseq train: {error}", file=sys.stderr)
        return 1


def _run(args, processes):
    module = task_module(args.task)
    saved = _saved(args) if args.resume else None
    settings, seed, preset = _settings(args, module, saved)
    out = args.out or Path("runs") / args.task / f"{preset}-{seed}"
    if not args.resume and (out / LAST).exists():
        raise ValueError(f"{out} already holds a run: give --resume to continue it, or another --out")
    ops = args.ops or (saved["label"]["ops"] if saved else preset_operators(module, preset))
    start = args.start if saved else trained_before(args.start, module, f"{args.task}/{preset}", seed)
    device = usable_device(own_device(args.device))
    if device.type == "cuda":
        torch.cuda.set_device(device)  # nothing of this process on another's
    recipe = Recipe(args.task, preset, settings, seed, ops, args.data, device, start)
    trainer = begin(recipe, out, saved, processes=processes, compile="inductor" if args.compile else None)
    why = trainer.fit()
    if processes.first:
        print(f"ended ({why}) at step {trainer.step}", flush=True)
        plot_curves(out)
    if why == "interrupted":
        return 130
    if processes.first:
        report(trainer, why, args.skip_test, args.data)
    return 0


def _saved(args):
    """The checkpoint to resume from; None where the run was killed before its first."""
    if args.out is None:
        raise ValueError("--resume needs the run's directory: --out DIR")
    if not args.out.is_dir():
        raise CheckpointError(f"--resume: {args.out} is no directory of a run")
    if not (args.out / LAST).exists():
        print(f"no checkpoint in {args.out} yet: starting at the beginning", flush=True)
        return None
    return load_checkpoint(args.out / LAST)


def _settings(args, module, saved):
    """The settings, the seed and the preset's name; of a resumed run those it began with."""
    if saved is None:
        preset, seed = args.preset or module.DEFAULT_PRESET, args.seed or 0
        return _override(preset_settings(args.task, preset), args), seed, preset
    description = saved["description"]
    if args.task != description["task"]:
        raise ValueError(
            f"{args.out} was begun with task {description['task']}, got {args.task}: a run keeps its settings"
        )
    settings = _override(from_dict(module.Settings, description["settings"]), args)
    seed = description["seed"] if args.seed is None else args.seed
    return settings, seed, args.preset or saved["label"]["preset"]


def _override(settings, args):
    settings = override(settings, args.assignments)
    limits = {name: getattr(args, name) for name in ("epochs", "steps") if getattr(args, name) is not None}
    return replace(settings, training=replace(settings.training, **limits))


def usable_device(name):
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        raise ValueError(f"--device {name} is not usable: {str(error).splitlines()[0]}") from None
    return device
