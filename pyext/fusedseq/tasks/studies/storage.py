"""The storage of a study's trials, by URL."""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from urllib.parse import unquote

import optuna
from optuna.storages.journal import JournalFileBackend
from sqlalchemy.exc import SQLAlchemyError

from fusedseq.tasks.training.errors import TrainingError

JOURNAL = "journal:///"
EXAMPLES = "sqlite:///FILE, journal:///FILE, postgresql://HOST/NAME, mysql://HOST/NAME"
# ?password=... at the end of a URL; the password in front of the host is found by `passwords`.
OPTION = re.compile(r"[?&](?:password|passwd|pwd)=([^&\s]+)", re.IGNORECASE)


def opened(url: str) -> optuna.storages.BaseStorage:
    """Optuna's storage of a URL: a database, or journal:///FILE, a file that is only appended to.

    As in SQLAlchemy's URLs, three slashes precede a relative path and four an absolute one.
    Errors: ValueError for an unusable URL; ImportError where a database's driver is missing. Their
        messages contain no password
    """
    if url.startswith(JOURNAL) and url != JOURNAL:
        return optuna.storages.JournalStorage(JournalFileBackend(url.removeprefix(JOURNAL)))
    # Processes wait for each other's writes. SQLite's default timeout, 5 s, is too short where one
    # of them writes to a slow disk.
    wait = {"connect_args": {"timeout": 120}} if url.startswith("sqlite:") else {}
    try:
        return optuna.storages.RDBStorage(url, engine_kwargs=wait)
    except ModuleNotFoundError:
        raise
    except ImportError as error:
        raise ImportError(without_passwords(str(error), url)) from None
    except (SQLAlchemyError, optuna.exceptions.OptunaError, ValueError, TypeError) as error:
        first = (str(error).splitlines() or [""])[0]
        why = without_passwords(first, url) or type(error).__name__
        raise ValueError(
            f"--storage must be a URL such as {EXAMPLES}, got {masked(url)!r} ({why})"
        ) from None


@contextmanager
def storing(url: str) -> Iterator[None]:
    """Raises TrainingError, without passwords, where the storage fails in the block, e.g. on a full
    disk.
    """
    try:
        yield
    except optuna.exceptions.StorageInternalError as error:
        why = str(error.__cause__ or error).splitlines()[0]
        text = f"the study could not be stored ({without_passwords(why, url)})"
        raise TrainingError(text) from error


def passwords(url: str) -> list[str]:
    """The passwords in a URL: that of scheme://user:password@host, and that of ?password=...

    A password may itself contain the signs / : and @.
    """
    user, at, _ = url.partition("://")[2].rpartition("@")
    in_front = user.partition(":")[2] if at else ""
    return [word for word in (in_front, *OPTION.findall(url)) if word]


def masked(url: str) -> str:
    """A URL with *** in place of its passwords."""
    for password in passwords(url):
        for before, after in ((":", "@"), ("=", "")):
            url = url.replace(before + password + after, f"{before}***{after}")
    return url


def without_passwords(text: str, url: str) -> str:
    """A text about a URL, whose passwords are masked in it; empty where one occurs elsewhere."""
    text = text.replace(url, masked(url))
    known = {word for password in passwords(url) for word in (password, unquote(password))}
    return "" if any(word in text for word in known) else text
