"""A second process that times the baselines with MKL unthrottled, whenever the first asks for it.

The limit of MKL (mkl.py) can only be lifted before torch is loaded. So a process of its own makes
the same inputs and calls the same baselines. The first process asks for one call at a time, between
calls of its own: both see the same machine, and only one of them computes.

The two exchange lines of JSON through the second one's standard input and output. Before the turn
changes, each waits until its threads sleep: those of OpenMP spin for some milliseconds after a
call, and would take a core from the other process.
"""

import contextlib
import json
import subprocess
import sys
import time
from pathlib import Path

import torch

from bench.suite import metrics, mkl, roofline
from bench.suite.case_list import CASES

ROOT = Path(__file__).parents[2]
THREADS_SLEEP = 0.03  # seconds after which the threads of OpenMP no longer spin


def without_dtype(case):
    """Returns the name of a case, the same whatever dtype it runs in."""
    return case.in_dtype(torch.float32).name


class SecondProcess:
    """Starts the second process; `close` ends it.

    Errors: OSError or CalledProcessError if the library that lifts the limit cannot be compiled;
        RuntimeError if the process ends or cannot make a case
    """

    def __init__(self):
        self._resources = contextlib.ExitStack()
        environment = self._resources.enter_context(mkl.environment("unthrottled"))
        self._process = subprocess.Popen(
            [sys.executable, "-m", "bench.suite.second_process"],
            cwd=ROOT,
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    @property
    def pid(self):
        return self._process.pid

    def close(self):
        """Ends the process."""
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        self._process.wait()
        self._process.stdout.close()
        self._resources.close()

    def prepare(self, case, full):
        """Makes the inputs of a case; returns {provider: call} of its baselines."""
        request = {"case": without_dtype(case), "dtype": str(case.dtype)[6:], "full": full}
        names = self._ask(request)
        return {name + metrics.UNTHROTTLED: Call(self, name) for name in names}

    def seconds(self, name):
        """Returns how long one call of this provider takes."""
        time.sleep(THREADS_SLEEP)
        return self._ask({"time": name})

    def gemm_rates(self, dtype):
        """Returns {product: operations per second} of torch's product."""
        return self._ask({"gemm": str(dtype)[6:]})

    def _ask(self, request):
        answer = ""
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write(json.dumps(request) + "\n")
            self._process.stdin.flush()
            answer = self._process.stdout.readline()
        if not answer:
            raise RuntimeError("the process with MKL unthrottled has ended")
        found = json.loads(answer)
        if "error" in found:
            raise RuntimeError(f"the process with MKL unthrottled: {found['error']}")
        return found["answer"]


class Call:
    """A baseline in the second process, which is timed there."""

    def __init__(self, process, name):
        self.process, self.name = process, name

    def seconds(self):
        return self.process.seconds(self.name)


class Baselines:
    """What the second process does: it answers requests about one case at a time."""

    def __init__(self):
        self.cases = {without_dtype(case): case for case in CASES}
        self.calls = {}

    def answer(self, request):
        if "case" in request:
            return self.prepare(**request)
        if "gemm" in request:
            rates = roofline.gemm_rates("cpu", getattr(torch, request["gemm"]))
            return {name: rate for name, rate in rates.items() if name.startswith("torch")}
        call = self.calls[request["time"]]
        call()  # wakes the threads: the first call after a pause takes longer
        seconds = roofline.seconds(call, "cpu")
        time.sleep(THREADS_SLEEP)
        return seconds

    def prepare(self, case, dtype, full):
        chosen = self.cases[case]
        torch.manual_seed(0)
        args, kwargs = chosen.in_dtype(getattr(torch, dtype)).inputs("cpu")
        providers = chosen.providers(full)
        self.calls = {
            name: roofline.bind(providers[name], args, kwargs, chosen.backward)
            for name in metrics.BASELINES
            if name in providers
        }
        for call in self.calls.values():
            call()
        return list(self.calls)


def main():
    if not mkl.is_unthrottled():
        raise SystemExit("bench.suite.second_process: the library is not preloaded")
    # Answers go to the original standard output; what libraries print goes to standard error.
    answers, sys.stdout = sys.stdout, sys.stderr
    baselines = Baselines()
    for line in sys.stdin:
        try:
            found = {"answer": baselines.answer(json.loads(line))}
        except Exception as error:
            found = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(found), file=answers, flush=True)


if __name__ == "__main__":
    main()
