"""The tasks and the operator sets by name."""

import importlib
from types import ModuleType
from typing import Any

# Every task module has
#     Settings, PRESETS {name: Settings}, DEFAULT_PRESET, build(settings, data, ...),
#     restore(description, ...)
# and, where they apply,
#     PRESET_OPERATORS {preset: operator set}: presets that are about their operators
#     BEGIN_WITH {preset: preset}: presets that start from the trained weights of another
#     SPACE {setting: values}: the search space of `fusedseq tune`
#     GRID {preset: Settings}: the documented table of `fusedseq grid`
TASKS = {
    "words": "fusedseq.tasks.words",
    "ptb": "fusedseq.tasks.ptb",
    "reverse": "fusedseq.tasks.reverse",
    "en-es": "fusedseq.tasks.en_es",
    "en-fr": "fusedseq.tasks.en_fr",
}
GENERATED = ("reverse",)  # the tasks whose data are always generated
TRANSLATION = ("en-es", "en-fr")  # the tasks whose model is a translator
OPERATORS = {
    "fused": "fusedseq.fused",
    "reference": "fusedseq.reference",
    "torch_mha": "fusedseq.models.torch_mha",
}


def task_module(name: str) -> ModuleType:
    """The module of a task."""
    return importlib.import_module(TASKS[name])


def preset_settings(task: str, preset: str) -> Any:
    """The Settings of a preset. Errors: ValueError where the task has no such preset"""
    presets = task_module(task).PRESETS
    if preset not in presets:
        raise ValueError(f"{task}: unknown preset {preset!r}; known are {', '.join(presets)}")
    return presets[preset]


def operators(name: str) -> ModuleType:
    """The module of an operator set, for the argument `ops` of the models.

    Errors: ValueError for an unknown one
    """
    if name not in OPERATORS:
        raise ValueError(f"ops must be one of {', '.join(OPERATORS)}, got {name!r}")
    return importlib.import_module(OPERATORS[name])


def task_operators(task: str) -> list[str]:
    """The names of the operator sets of a task; torch_mha is for translators alone."""
    return [name for name in OPERATORS if name != "torch_mha" or task in TRANSLATION]


def preset_operators(module: ModuleType, preset: str) -> str:
    """The name of a preset's operator set: fused, unless the preset is about other operators."""
    return getattr(module, "PRESET_OPERATORS", {}).get(preset, "fused")
