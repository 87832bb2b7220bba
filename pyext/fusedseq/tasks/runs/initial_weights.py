"""The weights of another run to start from: `fusedseq train TASK --from RUN`."""

from pathlib import Path
from types import ModuleType

from fusedseq.tasks.runs.restore import checkpoint_file, load_run, mismatches
from fusedseq.tasks.training import CheckpointError, Task


def start_from(task: Task, path: Path) -> None:
    """Loads the weights of another run of the same task into `task.model`, and nothing else of it.

    path: the directory of a run (its best.safetensors is used), or a checkpoint
    Errors: CheckpointError where the task, the vocabulary, or a parameter's name or shape differs
    """
    try:
        state = load_run(checkpoint_file(path))
    except CheckpointError as error:
        raise CheckpointError(f"--from: {error}") from None
    theirs, ours = state["description"], task.description()
    if theirs["task"] != ours["task"]:
        raise CheckpointError(
            f"--from {path} holds a model of {theirs['task']}, not of {ours['task']}"
        )
    if theirs["vocabulary"] != ours["vocabulary"]:
        raise CheckpointError(
            f"--from {path} holds a model of another vocabulary: its data or their settings differ"
        )
    if differing := mismatches(state["model"], task.model.state_dict()):
        more = f" and {len(differing) - 4} more" if len(differing) > 4 else ""
        raise CheckpointError(
            f"--from {path} does not fit this model: {', '.join(differing[:4])}{more}"
        )
    task.model.load_state_dict(state["model"])


def trained_before(
    path: Path | None, module: ModuleType, experiment: str, seed: int
) -> Path | None:
    """The run to start from: `path`, else the run that the preset starts from, else None.

    path: the value of --from    experiment: TASK/PRESET
    Errors: ValueError where the preset needs a trained run that does not exist
    """
    task, _, preset = experiment.partition("/")
    if path is not None or not (needed := usual_start(module, preset, seed)):
        return path
    path = Path("runs", task, needed)
    if not path.is_dir():
        raise ValueError(
            f"{experiment} starts from a trained {task}/{module.BEGIN_WITH[preset]}, and "
            f"there is no {path}: train that first, or give --from RUN"
        )
    return path


def usual_start(module: ModuleType, preset: str, seed: int) -> str | None:
    """The name of the run that a preset starts from; None where it starts from random weights."""
    needed = getattr(module, "BEGIN_WITH", {}).get(preset)
    return needed and f"{needed}-{seed}"


def run_name(path: Path) -> str:
    """The name of a run, from its directory or a checkpoint in it."""
    return (path if path.is_dir() else path.parent).resolve().name
