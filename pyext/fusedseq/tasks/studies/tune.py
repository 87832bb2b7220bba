"""`fusedseq tune TASK`: searches the settings with the lowest validation loss, by many short runs."""

import gc
import json
import shlex
import sys
from dataclasses import replace
from pathlib import Path

import torch

from fusedseq.tasks.catalog import preset_operators, preset_settings, task_module
from fusedseq.tasks.result import command
from fusedseq.tasks.run import Recipe, begin, carry_out
from fusedseq.tasks.train import add_common_arguments, usable_device
from fusedseq.tasks.training import (
    CheckpointError,
    TrainingError,
    as_dict,
    full_key,
    load_checkpoint,
    override,
    varied,
)  # fmt: skip
from fusedseq.tasks.training.failures import is_out_of_memory
from fusedseq.tasks.training.trainer import LAST


def add_arguments(parser):
    parser.description = (
        "Tries settings of a task in short runs, the trials, and finds those with the lowest validation loss (by Optuna). What is "
        "tried next follows from what was found; a trial that is worse than the others were by then is pruned. Stopped or killed, "
        "the same command goes on; the same command in many processes, on many machines with one --storage, shares the work."
    )
    add = parser.add_argument
    add_common_arguments(parser)
    add(
        "--trials",
        type=int,
        metavar="N",
        default=30,
        help="how many the study is to have in all (default: %(default)s)",
    )
    add("--epochs", type=int, metavar="N", default=10, help="of a trial (default: %(default)s)")
    add("--space", action="append", default=[], metavar="KEY=VALUE,...",
        help="search these values of a setting, instead of the task's own or beside them, e.g. model.layers=1,2 (repeatable)")  # fmt: skip
    add("--set", action="append", default=[], metavar="KEY=VALUE", dest="assignments",
        help="a setting that all trials have (repeatable; an unknown key lists the known)")  # fmt: skip
    add("--preset", help="where the other settings are from (default: the task's usual one)")
    add("--seed", type=int, default=0, help="of the search and of every run (default: %(default)s)")
    add("--study", default="tune", metavar="NAME", help="its name in the storage (default: %(default)s)")
    add("--storage", metavar="URL", help="where trials are kept: sqlite:///FILE, postgresql://..., mysql://..., or journal:///FILE, "
        "which may lie on a network file system (default: study.db in --out)")  # fmt: skip
    add("--sampler", choices=("tpe", "random"), default="tpe", help="what chooses settings (default: %(default)s)")
    add("--pruner", choices=("median", "halving", "none"), default="median",
        help="what ends hopeless trials: those worse than the median, or not among the best of a half (default: %(default)s)")  # fmt: skip
    add("--then-train", action="store_true",
        help="train the best settings for the preset's own number of epochs, and evaluate the test set")  # fmt: skip
    add("--out", metavar="DIR", type=Path, help="for runs, tables and plots (default: runs/TASK/STUDY)")


def run(args):
    try:
        return _run(args)
    except TrainingError as error:
        print(f"fusedseq tune: {error}", file=sys.stderr)
        return 1


def _run(args):
    from fusedseq.tasks.studies import study_report
    from fusedseq.tasks.studies.trials import Trials

    for name in ("trials", "epochs"):
        if getattr(args, name) < 1:
            raise ValueError(f"--{name} must be at least 1, got {getattr(args, name)}")
    if not args.study.replace("-", "").replace("_", "").isalnum():
        raise ValueError(f"--study must be of letters, digits, - and _, got {args.study!r}")
    recipe, space = _recipe(args)
    out = args.out or Path("runs") / args.task / args.study
    out.mkdir(parents=True, exist_ok=True)
    trials = Trials(args.storage or f"sqlite:///{out}/study.db", args.study, out, space, begun=_begun(recipe, space, args.epochs),
                    seed=args.seed, sampler=args.sampler, pruner=args.pruner)  # fmt: skip
    try:
        _search(trials, recipe, args.trials, args.epochs, lambda: study_report.write_table(trials))
    except KeyboardInterrupt:
        print("interrupted: the same command goes on from here", flush=True)
        study_report.write(trials)
        return 130
    study_report.write(trials)
    return _conclude(trials, recipe, args.then_train)


def _recipe(args):
    """What all trials share, and the space: {full key: values}."""
    module, preset = task_module(args.task), args.preset or task_module(args.task).DEFAULT_PRESET
    settings = override(preset_settings(args.task, preset), args.assignments)
    space = {**getattr(module, "SPACE", {}), **dict(_choices(settings, text) for text in args.space)}
    if not space:
        raise ValueError(f"{args.task} has no space of its own to search: give --space KEY=VALUE,VALUE,...")
    for assignment in args.assignments:
        if (key := full_key(settings, assignment.partition("=")[0])) in space:
            raise ValueError(f"--set: {key} is searched; to search fewer of its values give --space {key}=VALUE,...")
    ops = args.ops or preset_operators(module, preset)
    return Recipe(args.task, preset, settings, args.seed, ops, args.data, usable_device(args.device)), space


def _choices(settings, text):
    key, equals, values = text.partition("=")
    if not equals or not values:
        raise ValueError(f"--space: wanted key=value,value,..., got {text!r}")
    key = full_key(settings, key)
    section, name = key.split(".")
    found = [getattr(getattr(override(settings, [f"{key}={value}"]), section), name) for value in values.split(",")]
    return key, tuple(dict.fromkeys(found))


def _begun(recipe, space, epochs):
    """What the trials of a study have in common, as JSON; another --ops, --device or --data DIR makes no other loss."""
    shared = {"task": recipe.task, "preset": recipe.preset, "--seed": recipe.seed, "--epochs": epochs,
              "--data synthetic": recipe.data == "synthetic"}  # fmt: skip
    settings = {
        f"{section}.{key}": value for section, part in as_dict(recipe.settings).items() for key, value in part.items()
    }
    spaces = {f"--space {key}": values for key, values in space.items()}
    return json.loads(json.dumps({**shared, **{k: v for k, v in settings.items() if k not in space}, **spaces}))


def _with(settings, parameters):
    for key, value in parameters.items():
        section, name = key.split(".")
        settings = varied(settings, **{section: {name: value}})
    return settings


def _search(trials, recipe, total, epochs, write_table):
    while True:
        with trials.take(total) as trial:
            if trial is None:
                return
            told = ", ".join(f"{key.partition('.')[2]} {value}" for key, value in trial.params.items())
            print(f"\ntrial {trial.number} of {total}: {told}", flush=True)
            settings = varied(_with(recipe.settings, trial.params), training={"epochs": epochs})
            name = trials.folder(trial).name
            print(
                f"trial {trial.number}: {_try(trials, trial, replace(recipe, preset=name, settings=settings))}",
                flush=True,
            )
        write_table()
        gc.collect()  # a model may be in cycles, and the next one needs its memory
        if recipe.device.type == "cuda":
            torch.cuda.empty_cache()


def _try(trials, trial, recipe):
    """Runs a trial to its end and says what it was. What concerns this trial alone does not end the study."""
    out = trials.folder(trial)

    def judged(number, figures):
        trial.report(figures["loss"], number)
        return trial.should_prune()

    try:
        trainer = begin(recipe, out, _saved(trials, trial, recipe), on_validation=judged)
        for number, loss in enumerate(trainer.schedule.losses):  # of the process that began it
            trial.report(loss, number)
        why = trainer.fit()
        if why == "interrupted":
            raise KeyboardInterrupt
        if why == "stopped":
            trials.prune(trial)
            return "pruned"
        figures = trainer.finish()
    except (TrainingError, RuntimeError, MemoryError) as error:
        if isinstance(error.__cause__, OSError):  # a full disk is so for every trial
            raise
        if not isinstance(error, TrainingError) and not is_out_of_memory(error):
            raise
        trials.fail(trial, " ".join(str(error).split()))
        return f"failed: {error}"
    trials.complete(trial, figures["loss"], figures)
    return f"validation loss {figures['loss']:.6g}"


def _saved(trials, trial, recipe):
    """The checkpoint of the process that began the trial, where there is one and it is this trial's."""
    out = trials.folder(trial)
    with_settings = json.loads(json.dumps(as_dict(recipe.settings)))
    try:
        saved = load_checkpoint(out / LAST)
        if json.loads(json.dumps(saved["description"]["settings"])) == with_settings:
            return saved
    except CheckpointError:
        pass
    trials.begin_anew(trial)
    return None


def _command(recipe, best):
    settings = json.loads(json.dumps(as_dict(_with(recipe.settings, best.params))))
    data = f" --data {shlex.quote(recipe.data)}" if recipe.data else ""
    what = {"task": recipe.task, "preset": recipe.preset, "settings": settings, "seed": recipe.seed, "ops": recipe.ops}
    return command(what) + data


def _conclude(trials, recipe, then_train):
    best = trials.best()
    if trials.running():
        print("other processes are still at it: the last of them has the final word", flush=True)
    elif best is None:
        raise TrainingError("no trial came to its end: see the table for why")
    if best is not None:
        print(
            f"best: trial {best.number}, validation loss {best.value:.6g}; to train it:\n  {_command(recipe, best)}",
            flush=True,
        )
    if then_train and not trials.running():
        _train_best(trials, recipe, best)
    return 0


def _train_best(trials, recipe, best):
    out = trials.out / f"best-{best.number:04}"
    print(f"\ntraining the best for {recipe.settings.training.epochs} epochs", flush=True)
    # Named as the study, whose row, such as reverse/tune, its result is of.
    if carry_out(replace(recipe, preset=trials.name, settings=_with(recipe.settings, best.params)), out) is None:
        print(f"another process is at it, in {out}", flush=True)
