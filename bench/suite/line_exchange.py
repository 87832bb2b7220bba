"""How long a cache line takes from one CPU of this process to another.

Threads that share a call exchange cache lines. Where two CPUs share a cache, a line takes some 40
nanoseconds, between the groups of cores of a large processor ("CCX") or between sockets several
times as long. A virtual machine does not say which of the two it has, and its host may move a
virtual CPU at any time, so that the same call has one speed now and another one later. So the suite
measures it between the rounds of a case, and the tables mark the cases that were measured without a
common cache.
"""

import ctypes
import os
import subprocess
import tempfile
import time
from pathlib import Path

SOURCE = Path(__file__).with_suffix(".cpp")
BATCHES = 20  # 0.2 ms


class LineExchange:
    """Measures the exchange between the first and the last CPU that this process may use."""

    def __init__(self):
        cpus = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
        self.cpus = cpus[:1] + cpus[-1:]
        self.function = compiled() if len(cpus) > 1 else None

    def nanoseconds(self):
        """Returns the time of one line in nanoseconds; None if it cannot be measured here."""
        if self.function is None:
            return None
        found = self.function(*self.cpus, BATCHES)
        return found if found > 0 else None

    def every(self, seconds):
        """Returns Samples that are at least so many seconds apart."""
        return Samples(self, seconds)


class Samples:
    """What a LineExchange has measured during one case: `times`, in nanoseconds."""

    def __init__(self, exchange, seconds):
        self.exchange, self.seconds = exchange, seconds
        self.times, self._next = [], 0.0

    def measure(self):
        """Measures, unless the last time was a moment ago; returns whether it did."""
        if self.exchange.function is None or time.perf_counter() < self._next:
            return False
        found = self.exchange.nanoseconds()
        if found is not None:
            self.times.append(round(found, 1))
        self._next = time.perf_counter() + self.seconds
        return True


def compiled():
    """Returns line_exchange of line_exchange.cpp; None if there is no compiler ($CXX, or c++)."""
    compiler = os.environ.get("CXX", "c++").split()
    with tempfile.TemporaryDirectory(prefix="fusedseq-line-exchange-") as folder:
        library = Path(folder) / "line_exchange.so"
        options = ["-std=c++17", "-O2", "-shared", "-fPIC", "-pthread", "-o", library, SOURCE]
        try:
            subprocess.run([*compiler, *options], check=True, capture_output=True)
            function = ctypes.CDLL(str(library)).line_exchange
        except (OSError, subprocess.CalledProcessError):
            return None
    function.argtypes, function.restype = [ctypes.c_int] * 3, ctypes.c_double
    return function
