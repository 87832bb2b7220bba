"""A run of a task: what `fusedseq train`, `tune`, `grid` and `ensemble` share."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from fusedseq.data.escapes import escaped
from fusedseq.tasks.catalog import operators, task_module
from fusedseq.tasks.runs.initial_weights import run_name, start_from
from fusedseq.tasks.runs.model_card import is_card, model_card
from fusedseq.tasks.runs.restore import check_bounds, check_sizes, load_run
from fusedseq.tasks.runs.result import data_name, of_run, parameter_count, read_result
from fusedseq.tasks.training import Trainer, as_dict, named_settings
from fusedseq.tasks.training.checkpoint import load_checkpoint
from fusedseq.tasks.training.files import read_text, remove_unfinished, replaced
from fusedseq.tasks.training.former_names import with_current_names
from fusedseq.tasks.training.lock import LOCK, new_directory, try_lock
from fusedseq.tasks.training.plots import plot
from fusedseq.tasks.training.trainer import BEST, LAST, RESULT

CARD = "README.md"  # the name under which Hugging Face's hub shows a model card
# The settings that may change when a run is resumed.
FREE = [f"training.{key}" for key in ("epochs", "steps", "save_steps", "log_steps")]


@dataclass(frozen=True)
class Recipe:
    """What determines a run."""

    task: str  # the task's name
    preset: str  # the run's name; the name of its preset, if it has one
    settings: Any  # the Settings of the task's module
    seed: int
    ops: str  # the name of an operator set
    data: str | None  # a directory, 'synthetic', or None for $FUSEDSEQ_DATA
    device: torch.device
    start: Path | None = None  # a run, or a checkpoint, whose weights it starts from


def begin(recipe: Recipe, out: Path, saved: dict | None = None, **options: Any) -> Trainer:
    """Builds the task of a run and its Trainer in directory `out`.

    saved: the checkpoint to continue from    options: further arguments of Trainer
    Errors: ValueError where the checkpoint was started with other settings
    """
    r = recipe
    if saved:
        _check_continues(r, out, saved)
    check_bounds(r.settings)
    torch.manual_seed(r.seed)
    with named_settings("model", type(r.settings.model)):
        task = task_module(r.task).build(
            r.settings,
            r.data,
            ops=operators(r.ops),
            seed=r.seed,
            device=r.device,
            description=saved and saved["description"],
        )
    check_sizes(r.settings, task.model.state_dict())
    label = {"preset": r.preset, "ops": r.ops} | _start(r, task, saved)
    trainer = Trainer(task, r.settings.training, out, label=label, **options)
    if saved:
        trainer.load_state_dict(saved)
        best = None
        if trainer.schedule.best is not None:
            best = load_checkpoint(out / BEST)  # without which `finish` would fail at the end
        _check_longer(trainer, best)
    if trainer.processes.first:
        text = (
            f"{r.task}/{r.preset}: {parameter_count(task.model):,} parameters, {r.ops} operators "
            f"on {r.device}, seed {r.seed}, step {trainer.step}, into {out}"
        )
        print(escaped(text), flush=True)
    return trainer


def _start(recipe: Recipe, task: Any, saved: dict | None) -> dict[str, str]:
    """Loads the weights to start from; returns the label's entry about them."""
    if saved:
        return {name: run for name, run in saved["label"].items() if name == "from"}
    if recipe.start is None:
        return {}
    start_from(task, recipe.start)
    return {"from": run_name(recipe.start)}


def _check_longer(trainer: Trainer, best: dict | None) -> None:
    """Raises ValueError where a run has already been trained longer than its settings allow.

    best: its best checkpoint, if any, which a process that was killed may have written last
    """
    position = {"epoch": trainer.epoch, "index": trainer.index, "step": trainer.step}
    newest = (best or {}).get("position")
    if newest and newest["step"] > position["step"]:
        position = newest
    done = {"epochs": position["epoch"] + bool(position["index"]), "steps": position["step"]}
    for name, trained in done.items():
        limit = getattr(trainer.settings, name)
        if limit is not None and limit < trained:
            raise ValueError(
                f"training.{name} must be at least {trained}, which the run in {trainer.out} has "
                f"already reached, got {limit}"
            )


def _check_continues(recipe: Recipe, out: Path, saved: dict) -> None:
    """Raises ValueError where a checkpoint was started with settings that may not change."""
    description, label = saved["description"], saved["label"]
    _check_same(recipe, out, description | {"preset": label["preset"], "from": label.get("from")})


def _check_same(recipe: Recipe, out: Path, found: dict) -> None:
    """Raises ValueError where a recipe and an existing run differ in what may not change.

    found: the task, preset, seed and settings of the run, and the run it started `from`, if any
    """
    was = {key: found[key] for key in ("task", "preset", "seed")}
    was |= _flat(with_current_names(found["settings"]))
    given = {
        "task": recipe.task,
        "preset": recipe.preset,
        "seed": recipe.seed,
        **_flat(as_dict(recipe.settings)),
    }
    if recipe.start is not None:
        was["from"], given["from"] = found.get("from") or "random weights", run_name(recipe.start)
    for key in given:
        if key in was and given[key] != was[key] and key not in FREE:
            raise ValueError(
                f"{out} was started with {key} {was[key]}, got {given[key]}: the settings of a run "
                "cannot change"
            )


def _check_data(recipe: Recipe, result: dict) -> None:
    """Raises ValueError where a result is of other data than those of a recipe.

    Data in a directory of the same name are taken for the same.
    """
    data = result["data"]
    if data["name"] == data_name(recipe.task, recipe.data):
        return
    task_module(recipe.task).build(
        recipe.settings,
        recipe.data,
        ops=operators(recipe.ops),
        seed=recipe.seed,
        description=result | {"fingerprint": data["fingerprint"]},
    )


def _flat(settings: dict) -> dict[str, Any]:
    """{section.key: value}, with tuples as lists."""
    settings = json.loads(json.dumps(settings))
    return {
        f"{section}.{key}": value
        for section, part in settings.items()
        for key, value in part.items()
    }


def plot_curves(out: Path) -> None:
    """Draws the curves of a run; where that fails, e.g. on a full disk, it prints why. Without
    matplotlib nothing is drawn, which the trainer has said.
    """
    try:
        plot(out)
    except ImportError:
        return
    except (OSError, ValueError) as error:
        print(f"no plots: {error}", flush=True)


def report(
    trainer: Trainer, why: str, skip_test: bool = False, data: str | None = None
) -> dict[str, Any]:
    """Evaluates a run that has ended; prints its metrics, writes result.json and the model card.

    why: what `fit` returned    skip_test: evaluates no test split    data: as in the Recipe
    returns the content of result.json
    """
    task: Any = trainer.task
    results: dict[str, dict] = {"valid": trainer.finish()}
    print(f"valid: {metrics_line(results['valid'])}", flush=True)
    task.model.eval()
    for split in [] if skip_test else [name for name in task.splits if name.endswith("test")]:
        results[split] = task.evaluate(split)
        if hasattr(task, "more_metrics"):
            results[split] |= task.more_metrics(split, trainer.out)
        print(f"{split}: {metrics_line(results[split])}", flush=True)
    result = of_run(trainer, why, results, data)
    trainer.report(result)
    write_card(trainer.out, result)
    return result


def write_card(out: Path, result: dict[str, Any]) -> None:
    """Writes the model card of a run to README.md; where that fails, or would replace another
    file, it prints why.
    """
    try:
        if (out / CARD).exists() and not is_card(read_text(out / CARD)):
            print(f"no model card: {out / CARD} is another file, which is kept", flush=True)
            return
        with replaced(out / CARD) as file:
            file.write(model_card(result))
    except (OSError, ValueError) as error:
        print(f"no model card: {error}", flush=True)


def metrics_line(metrics: dict[str, Any]) -> str:
    """The metrics of a split as one line."""
    text = ", ".join(
        f"{name} {value if isinstance(value, str) else format(value, '.6g')}"
        for name, value in metrics.items()
    )
    return escaped(text)


def carry_out(recipe: Recipe, out: Path) -> dict[str, Any] | None:
    """Trains and evaluates a run in `out`, or what is left to do of it; returns its result.

    Returns None where another process is working on the run.
    Errors: KeyboardInterrupt after a signal, with a checkpoint written; ValueError where the run
        was started with other settings
    """
    out = Path(out)
    with new_directory(out), try_lock(out / LOCK) as ours:
        if not ours:
            return None
        saved = load_run(out / LAST, to_resume=True) if (out / LAST).exists() else None
        done = _finished(recipe, out, saved)
        if done is not None:
            remove_unfinished(out)
            if not (out / CARD).exists():  # a kill after the result was written
                write_card(out, done)
            print(f"{out} is finished: nothing is left to do", flush=True)
            return done
        trainer = begin(recipe, out, saved)
        why = trainer.fit()
        plot_curves(out)
        if why == "interrupted":
            raise KeyboardInterrupt
        return report(trainer, why, data=recipe.data)


def _finished(recipe: Recipe, out: Path, saved: dict | None) -> dict[str, Any] | None:
    """The result of a run with nothing left to do; None where it is to be trained longer.

    The checkpoint, which may not have been copied along with the result, is needed only to train
    longer.
    """
    if not (out / RESULT).exists():
        return None
    result = read_result(out / RESULT)
    _check_same(recipe, out, result)
    _check_data(recipe, result)
    before, wanted = result["settings"]["training"], as_dict(recipe.settings)["training"]
    if all(before[key] == wanted[key] for key in ("epochs", "steps")):
        return result
    if saved is None:
        raise ValueError(
            f"{out} has the result of a shorter run, and no {LAST} to continue it from"
        )
    return None
