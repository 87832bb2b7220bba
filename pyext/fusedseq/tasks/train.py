"""`fusedseq train TASK`: trains a preset of a task, with fused or reference operators."""

import sys
from dataclasses import replace
from pathlib import Path

import torch

from fusedseq.tasks.catalog import OPERATORS, TASKS, operators, preset_operators, task_module
from fusedseq.tasks.training import (
    CheckpointError,
    Trainer,
    TrainingError,
    as_dict,
    from_dict,
    load_checkpoint,
    override,
)  # fmt: skip
from fusedseq.tasks.training.plots import plot
from fusedseq.tasks.training.trainer import LAST

FREE = [f"training.{key}" for key in ("epochs", "steps", "save_steps", "log_steps")]  # a resumed run may change them


def add_common_arguments(parser):
    parser.add_argument("task", choices=TASKS)
    parser.add_argument("--data", metavar="DIR", help="the data's directory, or 'synthetic' (default: $FUSEDSEQ_DATA)")
    parser.add_argument(
        "--ops", choices=OPERATORS, help="which operators (default: fused, or what the preset is about)"
    )
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
    parser.add_argument("--resume", action="store_true", help="continue the run in --out exactly where it was saved")
    parser.add_argument("--skip-test", action="store_true", help="do not evaluate the test set at the end")


def run(args):
    try:
        return _run(args)
    except TrainingError as error:
        print(f"fusedseq train: {error}", file=sys.stderr)
        return 1


def _run(args):
    module = task_module(args.task)
    saved = _saved(args) if args.resume else None
    settings, seed, preset = _settings(args, module, saved)
    out = args.out or Path("runs") / args.task / f"{preset}-{seed}"
    if not args.resume and (out / LAST).exists():
        raise ValueError(f"{out} already holds a run: give --resume to continue it, or another --out")
    device = usable_device(args.device)
    torch.manual_seed(seed)
    description = saved and saved["description"]
    ops = args.ops or (saved["label"]["ops"] if saved else preset_operators(module, preset))
    task = module.build(settings, args.data, ops=operators(ops), seed=seed, device=device, description=description)
    trainer = Trainer(task, settings.training, out, label={"preset": preset, "ops": ops})
    if saved:
        trainer.load_state_dict(saved)
    print(f"{args.task}/{preset}: {parameter_count(task.model):,} parameters, {ops} operators on {device}, seed {seed}, "
          f"step {trainer.step}, into {out}", flush=True)  # fmt: skip
    why = trainer.fit()
    print(f"ended ({why}) at step {trainer.step}", flush=True)
    _plot(out)
    if why == "interrupted":
        return 130
    _report(args, task, trainer, why)
    return 0


def _plot(out):
    try:
        plot(out)
    except ImportError as error:
        print(f"no plots: they need the Python package {error.name} (pip install {error.name})", flush=True)


def _report(args, task, trainer, why):
    results = {"valid": trainer.finish()}
    task.model.eval()
    for split in [] if args.skip_test else [name for name in task.splits if name.endswith("test")]:
        results[split] = task.evaluate(split)
    for split, figures in results.items():
        print(f"{split}: " + ", ".join(f"{name} {value:.6g}" for name, value in figures.items()))
    description = task.description()
    trainer.report({
        "task": args.task, **trainer.label, "seed": description["seed"], "ended": why, "epochs": trainer.epoch,
        "steps": trainer.step, "seconds": round(trainer.seconds, 3), "parameters": parameter_count(task.model), **results,
        "settings": description["settings"],
    })  # fmt: skip


def parameter_count(model):
    return sum(p.numel() for p in model.parameters())


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
        if preset not in module.PRESETS:
            raise ValueError(f"{args.task}: unknown preset {preset!r}; known are {', '.join(module.PRESETS)}")
        return _override(module.PRESETS[preset], args), seed, preset
    description, preset = saved["description"], saved["label"]["preset"]
    began = from_dict(module.Settings, description["settings"])
    settings = _override(began, args)
    said = {"task": args.task, "preset": args.preset or preset, "seed": args.seed, **_flat(settings)}
    was = {"task": description["task"], "preset": preset, "seed": description["seed"], **_flat(began)}
    for key in was:
        if said[key] not in (was[key], None) and key not in FREE:
            raise ValueError(f"{args.out} was begun with {key} {was[key]}, got {said[key]}: a run keeps its settings")
    return settings, description["seed"], preset


def _override(settings, args):
    settings = override(settings, args.assignments)
    limits = {name: getattr(args, name) for name in ("epochs", "steps") if getattr(args, name) is not None}
    return replace(settings, training=replace(settings.training, **limits))


def _flat(settings):
    return {f"{section}.{key}": value for section, part in as_dict(settings).items() for key, value in part.items()}


def usable_device(name):
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        raise ValueError(f"--device {name} is not usable: {str(error).splitlines()[0]}") from None
    return device
