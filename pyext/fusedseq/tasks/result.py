"""What a finished run leaves as result.json: its figures, and all that is needed to judge and to repeat them."""

import os
from pathlib import Path

from fusedseq import machine
from fusedseq.data.locate import VARIABLE
from fusedseq.tasks.catalog import preset_operators, task_module
from fusedseq.tasks.start import usual_start
from fusedseq.tasks.training import as_dict

LENGTHS = (("training", "epochs"), ("training", "steps"))  # the settings that say how long a run may be


def of_run(trainer, why, figures, data):
    """The content of result.json.

    trainer: after `fit`    why: it ended    figures: {split: {name: value}}
    data: as given to the task: a directory, 'synthetic' or None. Its name is kept, not its path
    """
    task, description = trainer.task, trainer.task.description()
    what = {
        "task": description["task"], **trainer.label, "seed": description["seed"], "settings": description["settings"]
    }  # fmt: skip
    return {
        **what, "command": command(what), "changes": changes(what), "ended": why, "epochs": trainer.epoch,
        "steps": trainer.step, "seconds": round(trainer.seconds, 3),
        "seconds per epoch": round(trainer.seconds / trainer.epoch, 3) if trainer.epoch else None,
        "parameters": parameter_count(task.model), **figures,
        "data": {"name": data_name(data), "fingerprint": description["fingerprint"]},
        "device": str(trainer.device), **machine.facts(trainer.device),
    }  # fmt: skip


def parameter_count(model):
    return sum(p.numel() for p in model.parameters())


def data_name(data):
    """A word for where the data came from."""
    root = data or os.environ.get(VARIABLE)
    return Path(root).resolve().name if root else "generated"


def changes(what):
    """{section.key: value} of the settings in which a run differs from its preset, but for how long it may be.

    what: its task, preset and settings, as JSON has them"""
    preset = as_dict(task_module(what["task"]).PRESETS[_preset(what)])
    found = {}
    for section, part in what["settings"].items():
        for key, value in part.items():
            usual = preset[section].get(key)
            if _plain(value) != _plain(usual) and (section, key) not in LENGTHS:
                found[f"{section}.{key}"] = _plain(value)
    return found


def command(what):
    """The command that repeats a run, but for where its data lie, and the run it began with. what: as for `changes`, and its seed and ops"""
    task, preset, module = what["task"], _preset(what), task_module(what["task"])
    words = [f"fusedseq train {task} --preset {preset}"]
    words += [f"--set {key}={_text(value)}" for key, value in changes(what).items()]
    lengths = {key: what["settings"][section][key] for section, key in LENGTHS}
    lengths = {key: n for key, n in lengths.items() if n != getattr(module.PRESETS[preset].training, key)}
    if None in lengths.values():  # the one that is given first: there is none without both
        words += [
            f"--set training.{key}={_text(n)}" for key, n in sorted(lengths.items(), key=lambda pair: pair[1] is None)
        ]
    else:
        words += [f"--{key} {n}" for key, n in lengths.items()]
    words += [f"--seed {what['seed']}"] if what["seed"] else []
    start = what.get("from")
    words += [f"--from {start}"] if start and start != usual_start(module, preset, what["seed"]) else []
    words += [f"--ops {what['ops']}"] if what["ops"] != preset_operators(module, preset) else []
    return " ".join(words)


def _preset(what):
    """The run's preset; the default one for a run of a study, whose name is its own."""
    module = task_module(what["task"])
    return what["preset"] if what["preset"] in module.PRESETS else module.DEFAULT_PRESET


def _plain(value):
    """A setting as JSON gives it back."""
    return list(value) if isinstance(value, tuple) else value


def _text(value):
    """A setting as `--set` takes it."""
    if isinstance(value, list):
        return ",".join(map(str, value))
    return str(value).lower() if value is None or isinstance(value, bool) else str(value)
