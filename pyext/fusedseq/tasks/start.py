"""`fusedseq train TASK --from RUN`: the weights of another run to begin with."""

from pathlib import Path

from fusedseq.tasks.restored import checkpoint_file
from fusedseq.tasks.training import CheckpointError, load_checkpoint


def start_from(task, path):
    """Puts the weights of another run of the same task into `task.model`; nothing else of that run counts.

    path: a run's directory (its best.safetensors), or a checkpoint
    Errors: CheckpointError where task, vocabulary, names or shapes differ; of the last two it says which
    """
    state = load_checkpoint(checkpoint_file(path))
    theirs, ours = state["description"], task.description()
    if theirs["task"] != ours["task"]:
        raise CheckpointError(f"--from {path} holds a model of {theirs['task']}, not of {ours['task']}")
    if theirs["vocabulary"] != ours["vocabulary"]:
        raise CheckpointError(f"--from {path} holds a model of another vocabulary: its data or their settings differ")
    if wrong := misfits(state["model"], task.model.state_dict()):
        more = f" and {len(wrong) - 4} more" if len(wrong) > 4 else ""
        raise CheckpointError(f"--from {path} does not fit this model: {', '.join(wrong[:4])}{more}")
    task.model.load_state_dict(state["model"])


def misfits(found, wanted):
    """What keeps the weights `found` from being loaded as those `wanted`, in words; both are dicts of tensors."""
    shapes = {name: tuple(t.shape) for name, t in found.items()}
    return [f"{name} must be {tuple(t.shape)}, got {shapes.get(name, 'none')}" for name, t in wanted.items()
            if shapes.get(name) != tuple(t.shape)] + [f"{name} is none of its parameters" for name in found if name not in wanted]  # fmt: skip


def trained_before(path, module, row, seed):
    """The run to begin with: `path`, which --from says, else that of the trained row which this one needs, else None."""
    task, _, preset = row.partition("/")
    if path is not None or not (needed := usual_start(module, preset, seed)):
        return path
    path = Path("runs", task, needed)
    if not path.is_dir():
        raise ValueError(f"{row} begins with a trained {task}/{module.BEGIN_WITH[preset]}, and there is no {path}: "
                         "train that first, or give --from RUN")  # fmt: skip
    return path


def usual_start(module, preset, seed):
    """The name of the run that a preset begins with; None where it begins with random weights."""
    needed = getattr(module, "BEGIN_WITH", {}).get(preset)
    return needed and f"{needed}-{seed}"


def run_name(path):
    """The name of a run, by its directory or a checkpoint in it."""
    return (path if path.is_dir() else path.parent).resolve().name
