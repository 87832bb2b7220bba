"""The content of result.json: a run's metrics, and what is needed to judge and to repeat them."""

import shlex
from pathlib import Path
from typing import Any

import torch

from fusedseq import machine
from fusedseq.data.locate import root_of
from fusedseq.tasks.catalog import GENERATED, preset_operators, task_module
from fusedseq.tasks.runs.initial_weights import usual_start
from fusedseq.tasks.training import Trainer, as_dict
from fusedseq.tasks.training.files import read_json
from fusedseq.tasks.training.former_names import with_current_names

# The settings that limit the length of a run.
LENGTHS = (("training", "epochs"), ("training", "steps"))


def read_result(path: Path) -> dict[str, Any]:
    """The content of a run's result.json.

    Errors: ValueError, which names the file, where that is damaged
    """
    result = read_json(path)
    kinds: dict[str, type] = {"task": str, "preset": str, "seed": int, "settings": dict}
    kinds |= {"valid": dict, "data": dict, "seconds": float, "parameters": int}
    kinds |= {"machine": dict, "versions": dict}
    for key, kind in kinds.items():
        value = result.get(key)
        if not isinstance(value, kind) and not (kind is float and type(value) is int):
            raise ValueError(
                f"{path} is damaged: {key} must be of the type {kind.__name__}, got {value!r:.60}"
            )
    if not {"name", "fingerprint"} <= {*result["data"]}:
        raise ValueError(f"{path} is damaged: data must have a name and a fingerprint")
    for section, part in result["settings"].items():
        if not isinstance(part, dict):
            raise ValueError(f"{path} is damaged: its settings have no section {section!r:.60}")
    training = result["settings"].get("training", {})
    if not {"epochs", "steps"} <= {*training}:
        raise ValueError(f"{path} is damaged: its settings have no training.epochs and steps")
    return result


def of_run(
    trainer: Trainer, why: str, metrics: dict[str, dict[str, Any]], data: str | None
) -> dict[str, Any]:
    """The content of result.json.

    trainer: after `fit`    why: what `fit` returned    metrics: {split: {name: value}}
    data: the data as given to the task: a directory, 'synthetic' or None. Its name is stored, but
        not its path
    """
    task: Any = trainer.task
    description = task.description()
    what = {
        "task": description["task"],
        **trainer.label,
        "seed": description["seed"],
        "settings": description["settings"],
    }
    return {
        **what,
        "command": command(what),
        "changes": changes(what),
        "ended": why,
        "epochs": trainer.epoch,
        "steps": trainer.step,
        "seconds": round(trainer.seconds, 3),
        "seconds per epoch": round(trainer.seconds / trainer.epoch, 3) if trainer.epoch else None,
        "parameters": parameter_count(task.model),
        **metrics,
        "data": {
            "name": data_name(description["task"], data),
            "fingerprint": description["fingerprint"],
        },
        "device": str(trainer.device),
        **machine.facts(trainer.device),
    }


def parameter_count(model: torch.nn.Module) -> int:
    """The number of scalars in the model's parameters."""
    return sum(p.numel() for p in model.parameters())


def data_name(task: str, data: str | None) -> str:
    """The name of the data's directory; "generated" without one. data: as for `of_run`"""
    root = data if task in GENERATED else root_of(data)
    return Path(root).resolve().name if root else "generated"


def changes(what: dict[str, Any]) -> dict[str, Any]:
    """{section.key: value} of the settings in which a run differs from its preset.

    The limits of its length are excepted. what: its task, preset and settings, as JSON stores them
    """
    preset = as_dict(task_module(what["task"]).PRESETS[_preset(what)])
    found = {}
    for section, part in with_current_names(what["settings"]).items():
        for key, value in part.items():
            usual = preset[section].get(key)
            if _plain(value) != _plain(usual) and (section, key) not in LENGTHS:
                found[f"{section}.{key}"] = _plain(value)
    return found


def command(what: dict[str, Any]) -> str:
    """The command that repeats a run, for a POSIX shell, without the directory of its data.

    what: as for `changes`, and the run's seed, ops and, where it has one, `from`
    """
    task, preset, module = what["task"], _preset(what), task_module(what["task"])
    words = ["fusedseq", "train", task, "--preset", preset]
    for key, value in changes(what).items():
        words += ["--set", f"{key}={_text(value)}"]
    lengths = {key: what["settings"][section][key] for section, key in LENGTHS}
    usual = module.PRESETS[preset].training
    lengths = {key: n for key, n in lengths.items() if n != getattr(usual, key)}
    if None in lengths.values():
        # The limit that has a value is set first: settings without any limit are rejected.
        for key, n in sorted(lengths.items(), key=lambda pair: pair[1] is None):
            words += ["--set", f"training.{key}={_text(n)}"]
    else:
        words += [word for key, n in lengths.items() for word in (f"--{key}", str(n))]
    words += ["--seed", str(what["seed"])] if what["seed"] else []
    start = what.get("from")
    if start and start != usual_start(module, preset, what["seed"]):
        words += ["--from", start]
    words += ["--ops", what["ops"]] if what["ops"] != preset_operators(module, preset) else []
    return shlex.join(words)


def _preset(what: dict[str, Any]) -> str:
    """The run's preset; the task's default for a run of a study, which has a name of its own."""
    module = task_module(what["task"])
    return what["preset"] if what["preset"] in module.PRESETS else module.DEFAULT_PRESET


def _plain(value: Any) -> Any:
    """A setting as it is after a round trip through JSON."""
    return list(value) if isinstance(value, tuple) else value


def _text(value: Any) -> str:
    """A setting as `--set` parses it."""
    if isinstance(value, list):
        return ",".join(map(str, value)) or "()"
    return str(value).lower() if value is None or isinstance(value, bool) else str(value)
