"""Locks between processes, on files. The operating system releases them when a process ends."""

import errno
import fcntl
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from pathlib import Path

from fusedseq.tasks.training.files import opened
from fusedseq.tasks.training.processes import Processes

LOCK = ".lock"  # the name of the lock of a directory
# What flock reports on a file system that has no locks.
NO_LOCKS = (errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS)
# The locks that `try_lock` and `run_directory` hold around the current code.
_HELD: ContextVar[frozenset[Path]] = ContextVar("held", default=frozenset())


@contextmanager
def locked(path: str | Path) -> Iterator[None]:
    """Holds the lock inside the block; waits until no other process holds it."""
    descriptor = _locked_file(path, fcntl.LOCK_EX)
    try:
        yield
    finally:
        os.close(descriptor)


@contextmanager
def try_lock(path: str | Path) -> Iterator[bool]:
    """Takes the lock without waiting and holds it to the end of the block.

    Yields false where another process, or an outer block, holds it.
    """
    try:
        descriptor = _locked_file(path, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        yield False
        return
    try:
        with _held(path):
            yield True
    finally:
        os.close(descriptor)


@contextmanager
def _held(path: str | Path) -> Iterator[None]:
    """Lets `run_directory` know inside the block that the lock at `path` is held."""
    token = _HELD.set(_HELD.get() | {Path(path).resolve()})
    try:
        yield
    finally:
        _HELD.reset(token)


@contextmanager
def run_directory(out: Path, processes: Processes) -> Iterator[None]:
    """Holds the lock of a run's directory, which is created, in the first of several processes.

    A directory that the block leaves without any file is removed again. Where an outer block holds
    the lock, nothing happens: a command holds it from the reading of the checkpoint to the test
    evaluation, a study around each of its runs, and the trainer itself while it trains.
    Errors: ValueError, in every process, where another run holds the lock
    """
    if (out / LOCK).resolve() in _HELD.get():
        yield
        return
    with new_directory(out) if processes.first else _nothing():
        taken = _try_run_lock(out / LOCK) if processes.first else None
        try:
            refused = processes.first and taken is None
            if processes.from_first(lambda: refused):
                raise ValueError(
                    f"another process is working on the run in {out}: wait until it has ended, "
                    "or choose another directory"
                )
            with _held(out / LOCK):
                yield
        finally:
            if taken is not None:
                os.close(taken)


@contextmanager
def new_directory(path: Path, *parts: str) -> Iterator[None]:
    """Creates a directory with its parents.

    Where the block raises, those of them are removed again in which nothing but a lock was
    created.
    parts: directories inside `path` that are removed as well where they are empty
    """
    created = [p for p in (path, *path.parents) if not p.exists()]
    path.mkdir(parents=True, exist_ok=True)
    try:
        yield
    except BaseException:
        with suppress(OSError):
            if path in created and {p.name for p in path.iterdir()} <= {LOCK, *parts}:
                for part in parts:
                    (path / part).rmdir()
                (path / LOCK).unlink(missing_ok=True)
            for directory in created:
                directory.rmdir()
        raise


@contextmanager
def _nothing() -> Iterator[None]:
    yield


def _try_run_lock(path: Path) -> int | None:
    """A descriptor that holds the lock; None where another process holds it.

    On a file system without locks, a warning is printed and there is no lock.
    """
    try:
        return _locked_file(path, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return None
    except OSError as error:
        if error.errno not in NO_LOCKS:
            raise
        print(
            f"{path.parent} is on a file system without locks: start no second run in it",
            file=sys.stderr,
        )
        return os.open(os.devnull, os.O_RDONLY)


def _locked_file(path: str | Path, operation: int) -> int:
    """A descriptor of the file at `path`, which is created, with its lock held."""
    while True:
        descriptor = opened(path, os.O_RDWR | os.O_CREAT)
        try:
            fcntl.flock(descriptor, operation)
            # The file may have been removed, by `new_directory`, before it was locked.
            with suppress(FileNotFoundError):
                if os.path.samestat(os.fstat(descriptor), os.lstat(path)):
                    return descriptor
        except BaseException:
            os.close(descriptor)
            raise
        os.close(descriptor)
