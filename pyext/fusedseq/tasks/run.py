"""A run of a task, from its settings to its figures: what `fusedseq train`, `tune` and `grid` share."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from fusedseq.tasks.catalog import operators, task_module
from fusedseq.tasks.lock import try_lock
from fusedseq.tasks.result import of_run, parameter_count
from fusedseq.tasks.start import run_name, start_from
from fusedseq.tasks.training import Trainer, as_dict, load_checkpoint
from fusedseq.tasks.training.plots import plot
from fusedseq.tasks.training.trainer import LAST, RESULT

FREE = [f"training.{key}" for key in ("epochs", "steps", "save_steps", "log_steps")]  # a resumed run may change them


@dataclass(frozen=True)
class Recipe:
    """What a run is made of."""

    task: str  # its name
    preset: str  # the run's name: a preset's where it is one's
    settings: Any  # the Settings of the task's module
    seed: int
    ops: str  # an operator set's name
    data: str | None
    device: torch.device
    start: Path | None = None  # a run, or a checkpoint, with whose weights it begins


def begin(recipe, out, saved=None, **options):
    """The Trainer of a run, in `out`, its task built. saved: the checkpoint to go on from    options: of Trainer"""
    r = recipe
    if saved:
        _check_continues(r, out, saved)
    torch.manual_seed(r.seed)
    task = task_module(r.task).build(r.settings, r.data, ops=operators(r.ops), seed=r.seed, device=r.device,
                                     description=saved and saved["description"])  # fmt: skip
    label = {"preset": r.preset, "ops": r.ops} | _start(r, task, saved)
    trainer = Trainer(task, r.settings.training, out, label=label, **options)
    if saved:
        trainer.load_state_dict(saved)
    if trainer.processes.first:
        print(f"{r.task}/{r.preset}: {parameter_count(task.model):,} parameters, {r.ops} operators on {r.device}, "
              f"seed {r.seed}, step {trainer.step}, into {out}", flush=True)  # fmt: skip
    return trainer


def _start(recipe, task, saved):
    """Loads the weights to begin with; returns what the label says of them."""
    if saved:
        return {name: run for name, run in saved["label"].items() if name == "from"}
    if recipe.start is None:
        return {}
    start_from(task, recipe.start)
    return {"from": run_name(recipe.start)}


def _check_continues(recipe, out, saved):
    """Errors: ValueError where `saved` was begun with other settings, but for those that a resumed run may change"""
    description, label = saved["description"], saved["label"]
    _check_same(recipe, out, description | {"preset": label["preset"], "from": label.get("from")})


def _check_same(recipe, out, found):
    """found: a dict of a run's task, preset, seed, settings, and what it began `from`, if not random weights"""
    was = {key: found[key] for key in ("task", "preset", "seed")} | _flat(found["settings"])
    said = {"task": recipe.task, "preset": recipe.preset, "seed": recipe.seed,
            **_flat(as_dict(recipe.settings))}  # fmt: skip
    if recipe.start is not None:
        was["from"], said["from"] = found.get("from") or "random weights", run_name(recipe.start)
    for key in said:
        if key in was and said[key] != was[key] and key not in FREE:
            raise ValueError(f"{out} was begun with {key} {was[key]}, got {said[key]}: a run keeps its settings")


def _flat(settings):
    settings = json.loads(json.dumps(settings))  # a tuple is a list there
    return {f"{section}.{key}": value for section, part in settings.items() for key, value in part.items()}


def plot_curves(out):
    try:
        plot(out)
    except ImportError as error:
        print(f"no plots: they need the Python package {error.name} (pip install {error.name})", flush=True)


def report(trainer, why, skip_test=False, data=None):
    """Evaluates, prints and writes the figures of a run that has ended; returns its result. why: as `fit` returned
    data: of the recipe"""
    task, results = trainer.task, {"valid": trainer.finish()}
    task.model.eval()
    for split in [] if skip_test else [name for name in task.splits if name.endswith("test")]:
        results[split] = task.evaluate(split)
        if hasattr(task, "more_figures"):
            results[split] |= task.more_figures(split, trainer.out)
    for split, figures in results.items():
        print(f"{split}: {told(figures)}")
    result = of_run(trainer, why, results, data)
    trainer.report(result)
    return result


def told(figures):
    """The figures of a split in a line."""
    return ", ".join(
        f"{name} {value if isinstance(value, str) else format(value, '.6g')}" for name, value in figures.items()
    )


def carry_out(recipe, out):
    """The whole run in `out`, or what of it is left to do; returns its result, that of result.json.

    Where another process is at it: None. Interrupted by a signal: KeyboardInterrupt, with a checkpoint.
    """
    out = Path(out)
    out.mkdir(parents=True, exist_ok=True)
    with try_lock(out / ".lock") as ours:
        if not ours:
            return None
        saved = load_checkpoint(out / LAST) if (out / LAST).exists() else None
        done = _finished(recipe, out, saved)
        if done is not None:
            print(f"{out} is finished: nothing is left to do", flush=True)
            return done
        trainer = begin(recipe, out, saved)
        why = trainer.fit()
        plot_curves(out)
        if why == "interrupted":
            raise KeyboardInterrupt
        return report(trainer, why, data=recipe.data)


def _finished(recipe, out, saved):
    """The result of a run of which nothing is left to do; None where more epochs are wanted than it had. The checkpoint,
    which may not have travelled with it, is needed for those alone."""
    if not (out / RESULT).exists():
        return None
    result = json.loads((out / RESULT).read_text())
    _check_same(recipe, out, result)
    began, wanted = result["settings"]["training"], as_dict(recipe.settings)["training"]
    if all(began[key] == wanted[key] for key in ("epochs", "steps")):
        return result
    if saved is None:
        raise ValueError(f"{out} has the result of a shorter run, and no {LAST} to go on from")
    return None
