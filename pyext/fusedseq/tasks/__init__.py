"""The documented tasks, how they are trained and evaluated, and the commands for it.

words, ptb, reverse, en_es, en_fr: a module per task, with its settings and presets
catalog: the tasks and the operator sets by name    commands: the commands of `fusedseq`
training: the trainer    runs: one run from its settings to its result    studies: many runs
experiments: the experiments of the source reports, their reported values and our results
translation, adaptation, evaluation: what several tasks or commands share
"""

from pathlib import Path
from typing import Any


def load_model(
    path: str | Path, *, ops: str = "fused", device: str = "cpu"
) -> tuple[Any, dict[str, Any]]:
    """The model of a trained run, in eval mode, and its description.

    path: the directory of a run, for its best checkpoint, or a checkpoint
    ops: the operators to compute with, fused or reference: both load the same weights
    device: cpu, cuda or cuda:N
    returns the module of fusedseq.models, and a dict with its task, settings, seed, and vocabulary:
        a list of words, or {"source": words, "target": words} of a translator
    Errors: CheckpointError, which is a ValueError, where the checkpoint is missing or damaged;
        ValueError for an unknown operator set and a device that is not usable
    """
    from fusedseq.tasks.catalog import TASKS
    from fusedseq.tasks.commands.arguments import usable_device
    from fusedseq.tasks.runs.restore import restored

    return restored(Path(path), tuple(TASKS), ops=ops, device=usable_device(device, "device"))
