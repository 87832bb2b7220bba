"""A trained model from its checkpoint alone, without its data."""

from fusedseq.tasks.catalog import operators, task_module
from fusedseq.tasks.training import CheckpointError, load_checkpoint
from fusedseq.tasks.training.trainer import BEST


def checkpoint_file(path):
    """A run's directory stands for its best weights."""
    return path / BEST if path.is_dir() else path


def restored(path, tasks, *, ops, device):
    """The model of a checkpoint, in eval mode, and the checkpoint's description.

    path: a checkpoint, or a run's directory    tasks: the names of those it may be of    ops: an operator set's name
    Errors: CheckpointError where it is damaged, or of another task
    """
    path = checkpoint_file(path)
    state = load_checkpoint(path)
    description = state["description"]
    if description["task"] not in tasks:
        raise CheckpointError(f"{path} must hold a model of {' or '.join(tasks)}, got one of {description['task']}")
    model = task_module(description["task"]).restore(description, ops=operators(ops))
    model.load_state_dict(state["model"])
    return model.to(device).eval(), description
