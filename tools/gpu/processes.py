"""Child processes with time limits, and their logs."""

import contextlib
import json
import os
import signal
import subprocess
import threading
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
MAX_BYTES = 12 << 20  # of a file in OUT


def execute(command, log, seconds, environment):
    """Runs a command in its own process group for at most `seconds`; its output goes to the file
    `log`.

    Returns "done", or "FAILED: " with the reason. Every process that the command started is killed
    with it.
    """
    try:
        with open(log, "wb") as out:
            child = subprocess.Popen(
                command,
                stdout=out,
                stderr=subprocess.STDOUT,
                cwd=ROOT,
                env=environment,
                start_new_session=True,
            )
    except OSError as error:
        return f"FAILED: {error}"
    try:
        code = child.wait(max(1.0, seconds))
    except subprocess.TimeoutExpired:
        code = None
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)
        child.wait()
    if code is None:
        return "FAILED: not in time"
    return "done" if code == 0 else f"FAILED: exit code {code}"


def in_parallel(function, arguments):
    """Calls the function with each argument, each call in a thread, and waits for all."""
    threads = [threading.Thread(target=function, args=(argument,)) for argument in arguments]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def attempt(function, *args):
    """Returns what the function returns, or "" if it raises.

    A killed process leaves files that are incomplete or missing; they must not stop the other
    parts.
    """
    try:
        return function(*args)
    except Exception as error:
        print(f"   {type(error).__name__}: {error}", flush=True)
        return ""


def text_of(path):
    return path.read_text() if path.exists() else ""


def read_json(path):
    """Returns the content of a JSON file, or {} if it is missing or incomplete."""
    return attempt(json.loads, text_of(path) or "{}") or {}


def last_line(log):
    return log.read_text(errors="replace").strip().rpartition("\n")[2][:200]


def concatenate_logs(folder, pattern, max_bytes=MAX_BYTES):
    """Returns the logs that match, the oldest first, each shortened so that all fit."""
    paths = sorted(folder.glob(pattern), key=lambda path: path.stat().st_mtime)
    most = max_bytes // max(1, len(paths))
    return "".join(
        f"\n===== {path.stem}\n{shorten(path.read_text(errors='replace'), most)}" for path in paths
    )


def shorten(text, most):
    """Returns the text, or its beginning and its end if it is longer than `most` bytes."""
    data, half = text.encode(), most // 2 - 20
    if len(data) <= most:
        return text
    begin, end = data[:half].decode(errors="ignore"), data[-half:].decode(errors="ignore")
    return f"{begin}\n... cut ...\n{end}"
