"""The search of `fusedseq tune`: runs the trials of a study, and trains the best settings."""

import gc
import json
import shlex
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from fusedseq.tasks.runs.restore import load_run
from fusedseq.tasks.runs.result import command
from fusedseq.tasks.runs.run import Recipe, begin, carry_out
from fusedseq.tasks.studies.trials import Trials
from fusedseq.tasks.training import CheckpointError, TrainingError, as_dict, varied
from fusedseq.tasks.training.failures import is_out_of_memory
from fusedseq.tasks.training.trainer import LAST


def search(
    trials: Trials, recipe: Recipe, total: int, epochs: int, after_each: Callable[[], Any]
) -> None:
    """Runs trials until the study has `total` of them.

    recipe: what all trials share    epochs: of a trial    after_each: called after each trial
    Errors: TrainingError where the disk is full; KeyboardInterrupt after a signal
    """
    while True:
        with trials.take(total) as trial:
            if trial is None:
                return
            text = ", ".join(
                f"{key.partition('.')[2]} {value}" for key, value in trial.params.items()
            )
            print(f"\ntrial {trial.number} of {total}: {text}", flush=True)
            outcome = run_trial(trials, trial, recipe, epochs)
            print(f"trial {trial.number}: {outcome}", flush=True)
        after_each()
        gc.collect()  # a model may be in reference cycles, and the next one needs its memory
        if recipe.device.type == "cuda":
            torch.cuda.empty_cache()


def with_parameters(settings: Any, parameters: dict[str, Any]) -> Any:
    """The settings with {section.key: value} applied."""
    sections: dict[str, dict[str, Any]] = {}
    for key, value in parameters.items():
        section, name = key.split(".")
        sections.setdefault(section, {})[name] = value
    # In one change, because values that depend on each other are checked together.
    return varied(settings, **sections)


def run_trial(trials: Trials, trial: Any, recipe: Recipe, epochs: int) -> str:
    """Runs a trial to its end and returns a text about its outcome.

    A failure that concerns this trial alone, such as parameters that do not fit together, a loss
    that is not finite or too little memory, is recorded and does not end the study.
    """
    out = trials.folder(trial)

    def prunes(number: int, metrics: dict) -> bool:
        trial.report(metrics["loss"], number)
        return trial.should_prune()

    try:
        settings = with_parameters(recipe.settings, trial.params)
        settings = varied(settings, training={"epochs": epochs})
        recipe = replace(recipe, preset=out.name, settings=settings)
        trainer = begin(recipe, out, _saved(trials, trial, recipe), on_validation=prunes)
        task: Any = trainer.task
        trials.require_data(task.description()["fingerprint"])
        for number, loss in enumerate(trainer.schedule.losses):  # of an earlier process
            if prunes(number, {"loss": loss}):
                trials.prune(trial)
                return "pruned"
        why = trainer.fit()
        if why == "interrupted":
            raise KeyboardInterrupt
        if why == "stopped":
            trials.prune(trial)
            return "pruned"
        metrics = trainer.finish()
    except ValueError as error:
        # An error that names none of the trial's parameters, e.g. of the data, ends the study.
        if isinstance(error, CheckpointError) or not any(k in str(error) for k in trial.params):
            raise
        trials.fail(trial, " ".join(str(error).split()))
        return f"failed: {error}"
    except (TrainingError, RuntimeError, MemoryError) as error:
        if isinstance(error.__cause__, OSError):  # a full disk fails every trial
            raise
        if not isinstance(error, TrainingError) and not is_out_of_memory(error):
            raise
        trials.fail(trial, " ".join(str(error).split()))
        return f"failed: {error}"
    trials.complete(trial, metrics["loss"], metrics)
    return f"validation loss {metrics['loss']:.6g}"


def _saved(trials: Trials, trial: Any, recipe: Recipe) -> dict | None:
    """The checkpoint of the process that started the trial, if it exists and fits the trial."""
    out = trials.folder(trial)
    settings = json.loads(json.dumps(as_dict(recipe.settings)))
    try:
        saved = load_run(out / LAST, to_resume=True)
        if json.loads(json.dumps(saved["description"]["settings"])) == settings:
            return saved
    except CheckpointError:
        pass
    trials.clear(trial)
    return None


def conclude(trials: Trials, recipe: Recipe, then_train: bool) -> None:
    """Prints the best trial and the command that trains its settings.

    then_train: whether to train them at once, unless other processes are still running trials
    Errors: TrainingError where no trial is complete
    """
    best = trials.best()
    if trials.running():
        print(
            "other processes are still running trials: the last of them concludes the study",
            flush=True,
        )
    elif best is None:
        raise TrainingError("no trial is complete: see the table for the reasons")
    if best is not None:
        print(
            f"best: trial {best.number}, validation loss {best.value:.6g}; to train it:\n"
            f"  {_command(recipe, best)}",
            flush=True,
        )
    if then_train and not trials.running():
        _train_best(trials, recipe, best)


def _command(recipe: Recipe, best: Any) -> str:
    settings = json.loads(json.dumps(as_dict(with_parameters(recipe.settings, best.params))))
    data = f" --data {shlex.quote(recipe.data)}" if recipe.data else ""
    what = {
        "task": recipe.task,
        "preset": recipe.preset,
        "settings": settings,
        "seed": recipe.seed,
        "ops": recipe.ops,
    }
    return command(what) + data


def _train_best(trials: Trials, recipe: Recipe, best: Any) -> None:
    out = trials.out / f"best-{best.number:04}"
    print(f"\ntraining the best for {recipe.settings.training.epochs} epochs", flush=True)
    # The run has the study's name, because its result belongs to the study's experiment, e.g.
    # reverse/tune.
    settings = with_parameters(recipe.settings, best.params)
    if carry_out(replace(recipe, preset=trials.name, settings=settings), out) is None:
        print(f"another process is training it, in {out}", flush=True)
