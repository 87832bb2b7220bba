"""Reports out of memory, a full disk and similar failures as one sentence instead of a traceback.

The sentence names the last checkpoint, where there is one.
"""

import errno
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from fusedseq.tasks.training.errors import TrainingError

# The CPU allocator has no exception class of its own: torch raises RuntimeError with these texts,
# in upper or lower case.
ALLOCATION = (
    "allocate memory",
    "not enough memory",
    "out of memory",
    "alloc_failed",
    "bad_alloc",
    "bad allocation",
)
DISK = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EIO)


def is_out_of_memory(error: BaseException) -> bool:
    """Returns whether an exception reports a failed allocation, on a GPU or on the CPU."""
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    if isinstance(error, OSError):
        return error.errno == errno.ENOMEM
    text = str(error).lower()
    if isinstance(error, (RuntimeError, SystemError)) and any(part in text for part in ALLOCATION):
        return True
    # Python may raise another exception while it handles the failed allocation.
    return error.__cause__ is not None and is_out_of_memory(error.__cause__)


def last_good(checkpoint: Path) -> str:
    """A clause that names the last checkpoint, or says that there is none."""
    if not checkpoint.exists():
        return "there is no checkpoint yet"
    return f"the last checkpoint is {checkpoint}"


@contextmanager
def explained(where: Callable[[], str], checkpoint: Path) -> Iterator[None]:
    """Turns exceptions that a run cannot recover from into a TrainingError.

    where: called for a description of the current step
    checkpoint: the path of the last checkpoint
    """
    try:
        yield
    except (OSError, RuntimeError, SystemError, MemoryError) as error:
        if isinstance(error, TrainingError):
            raise
        if isinstance(error, OSError) and error.errno in DISK:
            raise TrainingError(
                f"a log could not be written ({error}) at {where()}: training stopped, "
                f"{last_good(checkpoint)}"
            ) from error
        if _is_from_torch_compile(error):
            why = str(getattr(error, "inner_exception", error)).strip().partition("\n")[0]
            raise TrainingError(
                f"torch.compile failed at {where()} ({why}): train without --compile"
            ) from error
        if isinstance(error, torch.distributed.DistError) or "gloo" in str(error):
            raise TrainingError(
                f"another process of this run ended, at {where()}: training stopped, "
                f"{last_good(checkpoint)}"
            ) from error
        if not is_out_of_memory(error):
            raise
        raise TrainingError(
            f"out of memory at {where()}: training stopped, {last_good(checkpoint)}; try a "
            "smaller data.batch with a larger training.accumulate"
        ) from error


def _is_from_torch_compile(error: BaseException) -> bool:
    # By the module's name, because importing torch._dynamo takes long.
    return any(kind.__module__ == "torch._dynamo.exc" for kind in type(error).__mro__)
