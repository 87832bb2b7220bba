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
        if isinstance(error, TrainingError):
            raise
        if any(kind.__module__ == "torch._dynamo.exc" for kind in type(error).__mro__):  # which is not imported here
            why = str(getattr(error, "inner_exception", error)).strip().partition("\n")[0]
            raise TrainingError(f"torch.compile failed at {where()} ({why}): "
                                f"leave --compile out") from error  # fmt: skip
        if isinstance(error, torch.distributed.DistError) or "gloo" in str(error):
            raise TrainingError(f"another process of this run ended, at {where()}: training stopped, "
                                f"the last good checkpoint is {checkpoint}") from error  # fmt: skip
        if not is_out_of_memory(error):
            raise
        raise TrainingError(f"out of memory at {where()}: training stopped, the last good checkpoint is {checkpoint}; "
                            f"try a smaller data.batch with a larger training.accumulate") from error  # fmt: skip
