"""Options of the benchmark suite, its progress lines, and the report at its end."""

import itertools
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from bench.suite import machine, mkl, report, roofline
from bench.suite.case_list import CASES
from bench.suite.line_exchange import LineExchange
from bench.suite.second_process import SecondProcess

ROOT = Path(__file__).parents[2]
RECORDED = ROOT / "bench/results"  # committed, and read by bench.suite.pages
OUT = ROOT / "build/bench"  # not tracked
DTYPES = {"float32": torch.float32, "float64": torch.float64, "bfloat16": torch.bfloat16}


def pytest_addoption(parser):
    group = parser.getgroup("fusedseq")
    group.addoption(
        "--full",
        action="store_true",
        help="run all cases, with more rounds, and compile whole loops too",
    )
    group.addoption("--device", default="cpu")
    group.addoption(
        "--dtype", choices=DTYPES, help="run every case in this dtype; by default in its own"
    )
    group.addoption("--op", default="", help="run only these operators, separated by commas")
    group.addoption(
        "--seconds", type=float, help="measuring time of a case (default 4, with --full 20)"
    )
    group.addoption(
        "--compile-seconds",
        type=float,
        help="longest compilation (default 60, with --full 240); 0: compile nothing",
    )
    group.addoption("--out", help="directory of the JSON and PNG files (default build/bench)")
    group.addoption(
        "--record",
        action="store_true",
        help="write into bench/results, whose files are committed, instead of build/bench",
    )
    group.addoption(
        "--compare",
        help="an earlier result: report what became slower, and exit with code 1 if anything did",
    )
    group.addoption(
        "--threshold",
        type=float,
        default=0.1,
        help="how much longer a case may take before it counts as slower (0.1: 10 %%)",
    )
    group.addoption(
        "--mkl",
        choices=[*mkl.MODES, mkl.BOTH],
        default=mkl.MODES[0],
        help="recorded in the result; `python -m bench.suite` preloads the library. both: time the "
        "baselines in a second process, too, in which it is preloaded",
    )


def selected_cases(config):
    """Returns the cases that the options select."""
    ops = [op for op in config.getoption("op").split(",") if op]
    unknown = sorted(set(ops) - {case.op for case in CASES})
    if unknown:
        known = ", ".join(dict.fromkeys(case.op for case in CASES))
        raise pytest.UsageError(f"--op: no such operator: {', '.join(unknown)}; known are {known}")
    cases = [
        case
        for case in CASES
        if (config.getoption("full") or not case.full) and (not ops or case.op in ops)
    ]
    if dtype := DTYPES.get(config.getoption("dtype")):
        cases = list({case.name: case for case in (c.in_dtype(dtype) for c in cases)}.values())
    return cases


def pytest_generate_tests(metafunc):
    if "case" in metafunc.fixturenames:
        metafunc.parametrize("case", selected_cases(metafunc.config), ids=lambda case: case.name)


class Session:
    """What the cases of one run share: settings, GEMM rates, and the entries measured so far."""

    def __init__(self, config):
        option = config.getoption
        self.full, self.device, self.mkl = option("full"), option("device"), option("mkl")
        self.seconds = option("seconds") or (20 if self.full else 4)
        limit = option("compile_seconds")
        self.compile_seconds = (240 if self.full else 60) if limit is None else limit
        self.total, self.entries, self.no_kernel = len(selected_cases(config)), [], []
        self.next = itertools.count(1).__next__
        self.started = time.perf_counter()
        self.gemm, self.lifted_gemm = {}, {}
        self.facts = machine.facts(self.device)
        self.line_exchange = LineExchange()
        self.second = self.start_second_process() if self.mkl == mkl.BOTH else None
        if self.mkl == mkl.BOTH:
            self.mkl = mkl.MODES[0]

    def start_second_process(self):
        """Returns the process in which MKL is unthrottled; None where that makes no difference, or
        where the library cannot be compiled."""
        if self.device != "cpu" or not mkl.is_limited(self.facts):
            return None
        try:
            return SecondProcess()
        except (OSError, subprocess.CalledProcessError) as error:
            self.say(f"without baselines with MKL unthrottled: {error}")
            return None

    def calls_with_mkl_unthrottled(self, case):
        """Returns {name: call} of the case's baselines in the second process.

        An optimizer's step and products of bf16 do not depend on MKL.
        """
        if not self.second or case.mode == "step" or case.dtype == torch.bfloat16:
            return {}
        return self.second.prepare(case, self.full)

    def close(self):
        if self.second:
            self.second.close()

    def announce(self, case):
        """Prints the name of a case that starts, and an estimate of the remaining time."""
        number = self.next()
        left = remaining(time.perf_counter() - self.started, number - 1, self.total)
        self.say(f"[{number}/{self.total}{left}] {case.name} ({case.mode}): ", end="")

    def measure_gemm_rates(self, dtype):
        """Measures the machine's GEMM rates again and retains the best seen so far."""
        best = self.gemm.setdefault(str(dtype), {})
        for name, rate in roofline.gemm_rates(self.device, dtype).items():
            best[name] = max(rate, best.get(name, 0.0))
        if self.second and dtype != torch.bfloat16:
            best = self.lifted_gemm.setdefault(str(dtype), {})
            for name, rate in self.second.gemm_rates(dtype).items():
                best[name] = max(rate, best.get(name, 0.0))

    def result(self):
        """The content of the result file."""
        return {
            **self.facts,
            "mkl": self.mkl,
            "device": self.device,
            "full": self.full,
            "no kernel": self.no_kernel,
            "gemm": self.gemm,
            **({"gemm, MKL unthrottled": self.lifted_gemm} if self.second else {}),
            "rows": self.entries,
        }

    def say(self, text, end="\n"):
        print(text, end=end, file=sys.stderr, flush=True)


def remaining(seconds, done, total):
    """Returns how long the rest of `total` cases takes if `done` of them took these seconds."""
    if not done:
        return ""
    minutes = seconds / done * (total - done) / 60
    return f", {minutes:.0f} min left" if minutes >= 1.5 else f", {60 * minutes:.0f} s left"


def folder(config):
    """Returns the directory that the options choose for the JSON and PNG files."""
    out, record = config.getoption("out"), config.getoption("record")
    if out and record:
        raise pytest.UsageError("--record writes into bench/results: give it, or --out, not both")
    return RECORDED if record else Path(out or OUT)


@pytest.fixture(scope="session")
def session(request):
    config = request.config
    if config.getoption("device") != "cpu" and not torch.cuda.is_available():
        raise pytest.UsageError(f"--device {config.getoption('device')}: torch finds no GPU here")
    if torch.device(config.getoption("device")).type == "cuda":
        torch.cuda.set_device(config.getoption("device"))  # which synchronize() waits for
    if config.getoption("mkl") == "unthrottled" and not mkl.is_unthrottled():
        raise pytest.UsageError("--mkl unthrottled: the library is not preloaded; run bench.suite")
    folder(config)  # its mistakes are reported before anything is measured
    session = config.benchmark_session = Session(config)
    for line in report.heading(session.facts | {"mkl": session.mkl}, machine.load()):
        session.say(line)
    yield session
    session.close()


def pytest_report_teststatus(report, config):
    """Suppresses pytest's dot for each case: the suite prints lines of its own."""
    return ("passed", "", "") if report.passed and report.when == "call" else None


@pytest.hookimpl(tryfirst=True)
def pytest_keyboard_interrupt(excinfo):
    """Shortens the traceback of a Ctrl-C to its outermost call.

    Python may have no line number for the innermost call, in which the signal arrived. Pytest's
    report of the traceback then raises an error, after which no partial result would be written.
    """
    excinfo.traceback = excinfo.traceback[:1]


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session):
    """Writes table, JSON and PNG; with --compare, exit code 1 if something became slower.

    Also after Ctrl-C, of the cases that were finished.
    """
    ours = getattr(session.config, "benchmark_session", None)
    if ours is None or not ours.entries:
        if ours is not None and ours.no_kernel:
            print(
                f"no requested operator has a kernel on {ours.device} in this build: "
                "nothing was timed"
            )
        return
    option = session.config.getoption
    interrupted = session.exitstatus == pytest.ExitCode.INTERRUPTED
    if interrupted:
        session.exitstatus = 130
        print(f"\ninterrupted after {len(ours.entries)} of {ours.total} cases, which are these:")
    name = [
        machine.slug(ours.facts, ours.device),
        option("dtype"),
        option("op").replace(",", "-"),
        "full" * ours.full,
        mkl.suffix(ours.mkl),
        "partial" * interrupted,
    ]
    slower = report.finish(
        ours.result(),
        folder(session.config),
        "-".join(filter(None, name)),
        option("compare"),
        option("threshold"),
    )
    if slower and session.exitstatus == 0:
        session.exitstatus = 1
