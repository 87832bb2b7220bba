"""The trainer. It knows no task: see `Trainer` for what a task gives it."""

from fusedseq.tasks.training.checkpoint import load_checkpoint, save_checkpoint
from fusedseq.tasks.training.errors import CheckpointError, TrainingError
from fusedseq.tasks.training.gradient import Step
from fusedseq.tasks.training.optimization import TrainingSettings
from fusedseq.tasks.training.settings import as_dict, from_dict, full_key, override, varied
from fusedseq.tasks.training.trainer import Trainer

__all__ = [
    "CheckpointError",
    "Step",
    "Trainer",
    "TrainingError",
    "TrainingSettings",
    "as_dict",
    "from_dict",
    "full_key",
    "load_checkpoint",
    "override",
    "save_checkpoint",
    "varied",
]
