"""Where a study's trials are kept, by URL."""

import optuna
from optuna.storages.journal import JournalFileBackend
from sqlalchemy.exc import SQLAlchemyError

JOURNAL = "journal:///"
EXAMPLES = "sqlite:///FILE, journal:///FILE, postgresql://HOST/NAME, mysql://HOST/NAME"


def opened(url):
    """Optuna's storage of a URL: of a database, or journal:///FILE, a file that is only ever written to at its end.

    As in SQLAlchemy's URLs three slashes begin a path from here, four one from the root.
    Errors: ValueError, ImportError where a database's driver is missing
    """
    if url.startswith(JOURNAL) and url != JOURNAL:
        return optuna.storages.JournalStorage(JournalFileBackend(url.removeprefix(JOURNAL)))
    # Processes wait for each other, as SQLite's own 5 s are little where one writes to a slow disk.
    patience = {"connect_args": {"timeout": 120}} if url.startswith("sqlite:") else {}
    try:
        return optuna.storages.RDBStorage(url, engine_kwargs=patience)
    except (SQLAlchemyError, optuna.exceptions.OptunaError) as error:
        why = str(error).splitlines()[0]
        raise ValueError(f"--storage must be a URL such as {EXAMPLES}, got {url!r} ({why})") from None
