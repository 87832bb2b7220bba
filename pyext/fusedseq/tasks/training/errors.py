"""Errors of training that are reported as one sentence, without a traceback."""


class CheckpointError(ValueError):
    """A checkpoint is missing, damaged, or belongs to another run. The caller can correct this."""


class TrainingError(RuntimeError):
    """Training cannot continue, e.g. because the loss is not finite or the disk is full.

    The last checkpoint, where there is one, remains on the disk.
    """
