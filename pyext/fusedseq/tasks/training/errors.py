class CheckpointError(ValueError):
    """A checkpoint that is missing, damaged or another run's: the caller's to mend."""


class TrainingError(RuntimeError):
    """Training cannot go on: the loss is not finite, or the disk is full. The last good checkpoint is kept."""
