"""Locks between processes, on files; a process that dies, however it dies, holds none."""

import fcntl
from contextlib import contextmanager


@contextmanager
def locked(path):
    """Waits until no other process is within it."""
    with open(path, "a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


@contextmanager
def try_lock(path):
    """Yields whether the lock is this process's now, and until the end of the block; waits for nobody."""
    with open(path, "a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            ours = True
        except BlockingIOError:
            ours = False
        yield ours
