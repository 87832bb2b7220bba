"""Where the time of a recurrence goes, by samples of Linux's `perf`: see `measure`."""

import os
import re
import shutil
import signal
import subprocess
import tempfile
import time
from collections import Counter
from contextlib import contextmanager
from pathlib import Path

import torch

TITLE = """Where the time of a forward and backward pass goes: the share of the samples that
`perf record -e cpu-clock` took of all threads. "Products" are those of the steps, "dW" the products
of the weights' gradients after the loop with what they pack, "packing" is that of the weights in
each call, "gates" all pointwise work of the steps (cells, rounds of the Mogrifier, dropout of the
state), "sums" the biases' gradients, "waiting" the barriers between the threads and OpenMP's, and
"the rest" memory that is cleared or first touched, torch and Python.
`python -m bench.suite.recurrence_profile --perf` measures this.
"""
GROUPS = ("products", "dW", "packing", "gates", "sums", "waiting", "the rest")
RATE = 3989  # samples per second and thread; not a divisor of a timer's rate
OURS = r"fusedseq::\w+::"
# The groups of the functions of csrc/cpu by their demangled names. The products of the steps and of
# dW are the same template with another split of a tile.
OF_FUNCTION = (
    ("dW", rf"{OURS}gemm_transposed\b|{OURS}(any_tile|tile_rows|tile)<.*Split\)1"),
    ("products", rf"{OURS}(any_tile|tile_rows|tile|gemm|gemm_chunk|linear|each_chunk)\b"),
    ("products", rf"{OURS}left_operand\b"),
    ("packing", rf"{OURS}pack\w*\b"),
    ("sums", rf"{OURS}(column_sums|add_row|product_sums)\b"),
    ("sums", rf"{OURS}Recurrent\w+<.*>::\w*_gradients?\b"),
    ("waiting", rf"{OURS}Barrier::"),
    ("gates", rf"{OURS}(Recurrent\w+<|mask_values\b|philox|parallel<.*recurrence)"),
)


def group(function, library):
    """Returns the group of a sample.

    function: the demangled name    library: the file that holds it, as perf prints it
    """
    if "libgomp" in library or "sched_yield" in function:
        return "waiting"
    for name, pattern in OF_FUNCTION:
        # The name of the function itself comes first; those of its arguments' types follow.
        if re.search(rf"^(\w+(<.*?>)? )?{pattern}", function):
            return name
    return "the rest"


def shares(script):
    """Returns {group: its share of the samples} of what `perf script -F ip,sym,dso` prints."""
    found = Counter()
    for line in script.splitlines():
        if parts := re.fullmatch(r"\s*[0-9a-f]+ (.*) \(([^()]*(?:\([^()]*\))?)\)\s*", line):
            found[group(*parts.groups())] += 1
    total = found.total()
    if not total:
        raise ValueError("perf took no samples")
    return {name: found[name] / total for name in GROUPS}


@contextmanager
def recorded(path):
    """Samples all threads of this process while the block runs, into the file `path`.

    Errors: RuntimeError where perf is not installed or may not sample
    """
    perf = shutil.which("perf")
    if perf is None:
        raise RuntimeError("--perf needs the program perf of Linux (Debian's package linux-perf)")
    command = [perf, "record", "-q", "-o", str(path), "-e", "cpu-clock", "-F", str(RATE)]
    process = subprocess.Popen(
        [*command, "-p", str(os.getpid())], stderr=subprocess.PIPE, text=True
    )
    try:
        time.sleep(1)  # it has attached to the threads by then
        if process.poll() is not None:
            raise RuntimeError(f"perf cannot sample this process: {process.stderr.read().strip()}")
        yield
    finally:
        process.send_signal(signal.SIGINT)
        process.communicate()


def measure(call, seconds):
    """Returns {group: share} of a call that is repeated for some seconds."""
    call()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "perf.data")
        with recorded(path):
            end = time.perf_counter() + seconds
            while time.perf_counter() < end:
                call()
        script = subprocess.run(
            ["perf", "script", "-i", str(path), "-F", "ip,sym,dso"],
            check=True,
            capture_output=True,
            text=True,
        )
    return shares(script.stdout)


def in_dtypes(recurrence, calls, seconds):
    """Returns {dtype: {group: share}} of forward and backward of a recurrence."""
    return {
        str(dtype).removeprefix("torch."): measure(
            calls(recurrence, dtype)["forward+backward"], seconds
        )
        for dtype in (torch.float32, torch.bfloat16)
    }


def lines(rows):
    """Returns the rows of the table as lists of cells, for rows that have shares."""
    return [
        [f"`{row['name']}`", dtype, *(f"{found[name]:.0%}" for name in GROUPS)]
        for row in rows
        for dtype, found in row.get("shares", {}).items()
    ]
