"""A trained model from its checkpoint alone, without its data.

A checkpoint may come from somebody else. What it says of itself is therefore compared with what it
holds, before a model is built from it.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from fusedseq import reference
from fusedseq.tasks.catalog import OPERATORS, TASKS, TRANSLATION, operators, task_module
from fusedseq.tasks.training import CheckpointError, from_dict, load_checkpoint
from fusedseq.tasks.training.trainer import BEST

# The most layers of a model, and the largest value of any other setting of it and of a list of the
# settings of the data. Where parameters have sizes, these are compared with the file's.
LAYERS, LARGEST = 1_000, 10_000_000


def checkpoint_file(path: Path) -> Path:
    """The checkpoint of a path: for the directory of a run, its best.safetensors."""
    return path / BEST if path.is_dir() else path


def load_run(path: Path, to_resume: bool = False) -> dict[str, Any]:
    """The state in a checkpoint of a run of one of the TASKS.

    Its description has the task, settings, seed, vocabulary and fingerprint, and its model the
    parameters of the model that these describe, all finite.
    to_resume: whether it must also have the state of training
    Errors: CheckpointError, which names the file; TrainingError where it does not fit into memory
    """
    state = load_checkpoint(path)
    try:
        _check_run(state)
        if to_resume:
            _check_training(state)
        return state
    except (KeyError, TypeError, ValueError, RecursionError, OverflowError) as error:
        why = f"it has no {error}" if isinstance(error, KeyError) else str(error)
        raise CheckpointError(f"checkpoint {path} cannot be used: {why[:500]}") from None


def restored(
    path: Path, tasks: Sequence[str], *, ops: str, device: torch.device | str
) -> tuple[Any, dict[str, Any]]:
    """The model of a checkpoint, in eval mode, and the checkpoint's description.

    path: a checkpoint, or the directory of a run    tasks: the names of the tasks it may belong to
    ops: the name of an operator set
    Errors: CheckpointError where it is damaged, or belongs to another task
    """
    path = checkpoint_file(path)
    state = load_run(path)
    description = state["description"]
    if description["task"] not in tasks:
        raise CheckpointError(
            f"{path} must hold a model of {' or '.join(tasks)}, got one of {description['task']}"
        )
    model = task_module(description["task"]).restore(description, ops=operators(ops))
    model.load_state_dict(state["model"])
    return model.to(device).eval(), description


def mismatches(found: dict[str, torch.Tensor], required: dict[str, torch.Tensor]) -> list[str]:
    """A text for each parameter because of which `found` cannot be loaded as `required`."""
    shapes = {name: tuple(t.shape) for name, t in found.items()}
    wrong = [
        f"{name} must be {tuple(t.shape)}, got {shapes.get(name, 'none')}"
        for name, t in required.items()
        if shapes.get(name) != tuple(t.shape)
    ]
    return wrong + [f"{name} is not a parameter of it" for name in found if name not in required]


def _check_run(state: Any) -> None:
    """Raises ValueError, KeyError or TypeError where a checkpoint is not one of a run."""
    _of_type("the checkpoint", state, dict)
    description, model = (_of_type(key, state[key], dict) for key in ("description", "model"))
    if (task := _of_type("task", description["task"], str)) not in TASKS:
        raise ValueError(f"task must be one of {', '.join(TASKS)}, got {task!r:.60}")
    for key in ("seed", "fingerprint"):
        _of_type(key, description[key], int)
    _check_vocabulary(task, description["vocabulary"])
    for name, weight in model.items():
        _of_type(f"model {name!r:.60}", weight, torch.Tensor)
    module = task_module(task)
    settings = from_dict(module.Settings, _of_type("settings", description["settings"], dict))
    check_sizes(settings, model)
    _check_parameters(module, description, model)


def _check_vocabulary(task: str, vocabulary: Any) -> None:
    """Raises an error unless this is a list of distinct words, or one for each language."""
    sides = {"vocabulary": vocabulary}
    if task in TRANSLATION:
        _of_type("vocabulary", vocabulary, dict)
        sides = {f"vocabulary of the {side}": vocabulary[side] for side in ("source", "target")}
    for name, words in sides.items():
        if not all(isinstance(word, str) for word in _of_type(name, words, list)):
            raise TypeError(f"{name} must consist of texts")
        if len(set(words)) < len(words):
            raise ValueError(f"{name} must consist of distinct words")
        if len(words) < 4 and task in TRANSLATION:
            raise ValueError(f"{name} must have its 4 special words, got {len(words)} words")


def check_bounds(settings: Any) -> None:
    """Raises ValueError where a model or its data would be larger than any run may have them."""
    for section in ("model", "data"):
        for name, value in vars(getattr(settings, section)).items():
            most = LAYERS if name == "layers" else LARGEST
            if section == "data" and isinstance(value, tuple) and len(value) > 100:
                raise ValueError(f"data.{name} must be at most 100 numbers, got {len(value):,}")
            for number in value if isinstance(value, tuple) else (value,):
                if isinstance(number, int) and number > most and "seed" not in name:
                    raise ValueError(f"{section}.{name} must be at most {most:,}, got {number:,}")


def check_sizes(settings: Any, model: Mapping[str, torch.Tensor]) -> None:
    """Raises ValueError where building the model would take much longer than the file is large.

    Every layer has parameters of its own, and a width is a side of a parameter. A run that begins
    is checked too, as its checkpoint could not be loaded.
    settings: of the run    model: the tensors in the file
    """
    check_bounds(settings)
    for field in dataclasses.fields(settings.model):
        value = getattr(settings.model, field.name)
        if isinstance(value, tuple) and len(value) > max(len(model), 100):
            raise ValueError(
                f"model.{field.name} has {len(value):,} entries, for {len(model):,} tensors"
            )
    layers = getattr(settings.model, "layers", 0)
    if layers > len(model):
        raise ValueError(
            f"model.layers must be at most {len(model):,}, for a model of {len(model):,} tensors, "
            f"got {layers:,}"
        )


def _check_parameters(
    module: ModuleType, description: dict[str, Any], model: Mapping[str, torch.Tensor]
) -> None:
    """Raises ValueError where the file has other parameters than the model, or not finite ones.

    The model is built on the device "meta", without memory for its parameters.
    """
    # A buffer may be computed from random numbers; a run that is built next draws its own.
    with torch.random.fork_rng(devices=[]), torch.device("meta"):
        built = module.restore(description, ops=reference)
    if differing := mismatches(dict(model), built.state_dict()):
        more = f" and {len(differing) - 4} more" if len(differing) > 4 else ""
        raise ValueError(f"its model does not fit its settings: {', '.join(differing[:4])}{more}")
    for name, parameter in built.named_parameters():
        weight = model[name]
        if weight.dtype != parameter.dtype:
            raise ValueError(f"{name} must be {parameter.dtype}, got {weight.dtype}")
        if not weight.isfinite().all():
            raise ValueError(f"{name} has values that are not finite")


def _check_training(state: dict[str, Any]) -> None:
    """Raises an error where the checkpoint has no state to continue from."""
    label = _of_type("label", state["label"], dict)
    for key in ("preset", "ops"):
        _of_type(key, label[key], str)
    if label["ops"] not in OPERATORS:
        raise ValueError(f"ops must be one of {', '.join(OPERATORS)}, got {label['ops']!r:.60}")
    _of_type("from", label.get("from", ""), str)
    for key in ("optimization", "schedule", "task", "position", "train", "rng"):
        _of_type(key, state[key], dict)


def _of_type(name: str, value: Any, kind: type) -> Any:
    """`value`, which must be of a type. Errors: TypeError"""
    if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
        raise TypeError(f"{name} must be of the type {kind.__name__}, got {value!r:.60}")
    return value
