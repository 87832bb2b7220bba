"""Out of memory, a full disk: a sentence and the last good checkpoint, not a traceback."""

import errno
from contextlib import contextmanager

import torch

from fusedseq.tasks.training.errors import TrainingError

# The CPU's allocator has no exception of its own: torch raises these as RuntimeError.
ALLOCATION = ("can't allocate memory", "not enough memory", "out of memory", "ALLOC_FAILED", "std::bad_alloc")
DISK = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EIO)


def is_out_of_memory(error):
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    return isinstance(error, RuntimeError) and any(text in str(error) for text in ALLOCATION)


@contextmanager
def explained(where, checkpoint):
    """Turns what a run cannot go on from into a TrainingError. where: called for the step's name"""
    try:
        yield
    except OSError as error:
        if error.errno not in DISK:
            raise
        raise TrainingError(f"a log could not be written ({error}) at {where()}: training stopped, "
                            f"the last good checkpoint is {checkpoint}") from error  # fmt: skip
    except (RuntimeError, MemoryError) as error:
        if isinstance(error, TrainingError) or not is_out_of_memory(error):
            raise
        raise TrainingError(f"out of memory at {where()}: training stopped, the last good checkpoint is {checkpoint}; "
                            f"try a smaller data.batch with a larger training.accumulate") from error  # fmt: skip
