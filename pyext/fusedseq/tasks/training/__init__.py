"""The trainer. It depends on no particular task: see `task.Task` for what a task provides."""

from fusedseq.tasks.training.checkpoint import load_checkpoint, save_checkpoint
from fusedseq.tasks.training.errors import CheckpointError, TrainingError
from fusedseq.tasks.training.optimization import TrainingSettings
from fusedseq.tasks.training.settings import (
    as_dict,
    from_dict,
    full_key,
    named_settings,
    one_of,
    override,
    varied,
)
from fusedseq.tasks.training.task import Step, Task
from fusedseq.tasks.training.trainer import Trainer

__all__ = [
    "CheckpointError",
    "Step",
    "Task",
    "Trainer",
    "TrainingError",
    "TrainingSettings",
    "as_dict",
    "from_dict",
    "full_key",
    "load_checkpoint",
    "named_settings",
    "one_of",
    "override",
    "save_checkpoint",
    "varied",
]
