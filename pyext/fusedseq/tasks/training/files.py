"""Files in the directory of a run.

The directory may come from somebody else, e.g. to be resumed, and what is in it is therefore not
trusted. Nothing is written through a symbolic link or a hard link: every file is written under a
fresh name in the same directory, flushed to the disk, and renamed over the previous one. FIFOs,
devices and sockets are neither read nor written; opening a FIFO would wait for ever.
"""

import errno
import json
import math
import os
import secrets
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any

KINDS = (
    (stat.S_ISLNK, "a symbolic link"),
    (stat.S_ISDIR, "a directory"),
    (stat.S_ISFIFO, "a FIFO"),
    (stat.S_ISSOCK, "a socket"),
    (stat.S_ISCHR, "a device"),
    (stat.S_ISBLK, "a device"),
)
TEMPORARY = ".*.tmp"  # the pattern of the names of unfinished files


def kind_of(mode: int) -> str:
    """The kind of a file, as words for a message. mode: the st_mode of os.stat"""
    return next((words for test, words in KINDS if test(mode)), "a regular file")


@contextmanager
def replaced(path: str | Path, mode: str = "w") -> Iterator[IO[Any]]:
    """A new file that replaces `path` at the end of the block, where the block raises nothing.

    At any moment the file at `path` is the previous or the new one, both complete. A symbolic link
    at `path` is replaced by the file, not followed.
    mode: "w" for text in UTF-8 without a translation of line ends, "wb" for bytes
    Errors: OSError, which names `path`; ValueError where `path` is neither a file nor a link
    """
    path = Path(path)
    file, temporary = unfinished(path, mode)
    try:
        with named(path), file:
            yield file
            finish(file, temporary, path)
    except BaseException:
        with suppress(OSError):
            os.unlink(temporary)
        raise


@contextmanager
def named(path: Path) -> Iterator[None]:
    """Gives the name `path` to an OSError of the block that names no file, e.g. of a full disk."""
    try:
        yield
    except OSError as error:
        if error.filename is None and error.errno is not None:
            raise OSError(error.errno, error.strerror, str(path)) from error
        raise


def unfinished(path: Path, mode: str = "w") -> tuple[IO[Any], str]:
    """A new file in the directory of `path`, opened for writing, and its temporary name.

    It has the permissions that `open` gives a new file.
    Errors: as for `replaced`
    """
    refuse_special(path)
    temporary = str(path.with_name(f".{path.name}.{secrets.token_hex(8)}.tmp"))
    try:
        # O_EXCL: the name is new, and a symbolic link is not followed. tempfile.mkstemp does the
        # same, but gives no one else permission to read the file.
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        descriptor = os.open(temporary, flags, 0o666)
    except OSError as error:  # it names the temporary file
        raise OSError(error.errno, error.strerror, str(path)) from error
    text = {} if "b" in mode else {"newline": "", "encoding": "utf-8"}
    return open(descriptor, mode, **text), temporary


def finish(file: IO[Any], temporary: str, path: Path) -> None:
    """Flushes an `unfinished` file to the disk and gives it its name; it stays open."""
    file.flush()
    os.fsync(file.fileno())
    os.replace(temporary, path)
    directory = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(directory)  # so that the rename survives a power failure
    finally:
        os.close(directory)


def remove_unfinished(folder: Path) -> None:
    """Removes the unfinished files of a process that was killed while it wrote into a directory.

    No other process may be writing there.
    """
    for stale in folder.glob(TEMPORARY):
        with suppress(OSError):
            stale.unlink()


def refuse_special(path: Path) -> None:
    """Raises ValueError where `path` exists and is neither a regular file nor a link to one.

    A link to a device, and one that leads through /dev or /proc, such as /dev/stdout, is refused: a
    file would take its place.
    """
    with suppress(OSError):  # it does not exist, or the link leads nowhere
        for mode in (os.lstat(path).st_mode, os.stat(path).st_mode):
            if not stat.S_ISREG(mode) and not stat.S_ISLNK(mode):
                raise ValueError(f"{path} must be a regular file, got {kind_of(mode)}")
    if leads_to_system(path):
        raise ValueError(f"{path} must be a regular file, got one of /dev or /proc")


def leads_to_system(path: Path) -> bool:
    """Returns whether a path, or a symbolic link on the way from it, is in /dev or /proc.

    /dev/stdout is a link to /proc/self/fd/1, which is a link to the file that it was redirected to.
    """
    place, seen = os.path.abspath(path), 0
    while True:
        folder = os.path.realpath(os.path.dirname(place)) + "/"
        if folder.startswith(("/dev/", "/proc/")) and not folder.startswith("/dev/shm/"):
            return True
        if not os.path.islink(place) or seen > 40:
            return False
        place, seen = os.path.join(folder, os.readlink(place)), seen + 1


def refuse_link(directory: Path) -> None:
    """Raises ValueError where `directory` exists and is anything but a real directory.

    The files in it would be written to where a symbolic link leads.
    """
    with suppress(FileNotFoundError):
        mode = os.lstat(directory).st_mode
        if not stat.S_ISDIR(mode):
            raise ValueError(f"{directory} must be a directory, got {kind_of(mode)}")


def opened(path: str | Path, flags: int = os.O_RDONLY) -> int:
    """A descriptor of a regular file.

    A file that is written, or created by os.O_CREAT, must not be a symbolic link.
    Errors: ValueError for another kind of file; OSError
    """
    writes = flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT)
    no_link = os.O_NOFOLLOW if writes else 0
    try:
        # O_NONBLOCK: opening a FIFO does not wait for its other end.
        descriptor = os.open(path, flags | no_link | os.O_NONBLOCK | os.O_CLOEXEC, 0o666)
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.ENXIO, errno.EISDIR):
            with suppress(OSError):
                mode = os.lstat(path).st_mode
                raise ValueError(f"{path} must be a regular file, got {kind_of(mode)}") from None
        raise
    mode = os.fstat(descriptor).st_mode
    if not stat.S_ISREG(mode):
        os.close(descriptor)
        raise ValueError(f"{path} must be a regular file, got {kind_of(mode)}")
    return descriptor


def read_text(path: str | Path) -> str:
    """The text of a regular file. Errors: ValueError, which names the file; OSError"""
    with open(opened(path), "rb") as file:
        try:
            return file.read().decode()
        except UnicodeDecodeError as error:
            raise ValueError(f"{path} is damaged: {error}") from None


def read_json(path: str | Path) -> dict[str, Any]:
    """The JSON object in a file.

    Errors: ValueError, which names the file, where that is damaged; OSError
    """
    text = read_text(path)
    try:
        found = json.loads(text)
    except RecursionError:
        raise ValueError(f"{path} is damaged: its JSON is nested too deeply") from None
    except ValueError as error:
        raise ValueError(f"{path} is damaged: it is not JSON ({error})") from None
    if not isinstance(found, dict):
        raise ValueError(f"{path} is damaged: it must hold a JSON object")
    return found


def write_json(path: str | Path, value: Any) -> None:
    """Writes JSON atomically; see `replaced` and `finite`."""
    with replaced(path) as file:
        file.write(json.dumps(finite(value), indent=1, allow_nan=False) + "\n")


def finite(value: Any) -> Any:
    """A result with null in place of numbers that JSON does not have: NaN and infinity."""
    if isinstance(value, dict):
        return {key: finite(part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [finite(part) for part in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
