"""The tasks by name, and the operator sets."""

import importlib

# Each module has PRESETS (the rows), DEFAULT_PRESET, Settings, build(settings, data, ...) and restore(description, ...); and
# PRESET_OPERATORS, where a row is about its operators; BEGIN_WITH, where it begins with another row's trained weights; SPACE,
# {setting: values}, where `fusedseq tune` has one to search; GRID, {preset: Settings}, where `fusedseq grid` has a table to make.
TASKS = {
    "words": "fusedseq.tasks.words",
    "ptb": "fusedseq.tasks.ptb",
    "reverse": "fusedseq.tasks.reverse",
    "en-es": "fusedseq.tasks.en_es",
    "en-fr": "fusedseq.tasks.en_fr",
}
OPERATORS = {"fused": "fusedseq.fused", "reference": "fusedseq.reference", "torch_mha": "fusedseq.models.torch_mha"}


def task_module(name):
    return importlib.import_module(TASKS[name])


def preset_settings(task, preset):
    """Errors: ValueError where the task has no such preset"""
    presets = task_module(task).PRESETS
    if preset not in presets:
        raise ValueError(f"{task}: unknown preset {preset!r}; known are {', '.join(presets)}")
    return presets[preset]


def operators(name):
    return importlib.import_module(OPERATORS[name])


def preset_operators(module, preset):
    """The name of the operators that a preset is for: fused, but for a row that is about others."""
    return getattr(module, "PRESET_OPERATORS", {}).get(preset, "fused")
