"""Options of the suite, its progress lines, and the report at its end."""

import itertools
import sys
from pathlib import Path

import pytest
import torch

from bench import machine, report, roofline
from bench.cases import ROWS

DTYPES = {"float32": torch.float32, "float64": torch.float64, "bfloat16": torch.bfloat16}


def pytest_addoption(parser):
    group = parser.getgroup("fusedseq")
    group.addoption("--full", action="store_true", help="all rows, more rounds, and whole loops compiled")
    group.addoption("--device", default="cpu")
    group.addoption("--dtype", choices=DTYPES, help="run every row in this dtype; by default in its own")
    group.addoption("--op", default="", help="only these operators, separated by commas")
    group.addoption("--seconds", type=float, help="measuring time of a row (4, with --full 20)")
    group.addoption("--compile-seconds", type=float, help="longest compilation (60, with --full 240); 0: none")
    group.addoption("--out", default=str(Path(__file__).parent / "results"), help="where JSON and PNG go")
    group.addoption("--compare", help="an earlier result: say what got slower, exit code 1 where anything did")
    group.addoption("--threshold", type=float, default=0.1, help="how much slower is slower (0.1: 10 %%)")


def chosen(config):
    """The rows to run."""
    ops = [op for op in config.getoption("op").split(",") if op]
    unknown = sorted(set(ops) - {row.op for row in ROWS})
    if unknown:
        known = ", ".join(dict.fromkeys(row.op for row in ROWS))
        raise pytest.UsageError(f"--op: no such operator: {', '.join(unknown)}; there are {known}")
    rows = [row for row in ROWS if (config.getoption("full") or not row.full) and (not ops or row.op in ops)]
    if dtype := DTYPES.get(config.getoption("dtype")):
        rows = list({row.name: row for row in (row.in_dtype(dtype) for row in rows)}.values())
    return rows


def pytest_generate_tests(metafunc):
    if "row" in metafunc.fixturenames:
        metafunc.parametrize("row", chosen(metafunc.config), ids=lambda row: row.name)


class Session:
    """What the rows of one run share: settings, roofs, and the results so far."""

    def __init__(self, config):
        option = config.getoption
        self.full, self.device = option("full"), option("device")
        self.seconds = option("seconds") or (20 if self.full else 4)
        budget = option("compile_seconds")
        self.compile_seconds = (240 if self.full else 60) if budget is None else budget
        self.total, self.results, self.no_kernel = len(chosen(config)), [], []
        self.next = itertools.count(1).__next__
        self.gemm = {}
        self.facts = machine.facts(self.device)

    def gemm_rates(self, dtype):
        """The machine's GEMM rates: the best seen so far, measured again at every row."""
        now, best = roofline.gemm_rates(self.device, dtype), self.gemm.setdefault(str(dtype), {})
        for name, rate in now.items():
            best[name] = max(rate, best.get(name, 0.0))

    def document(self):
        return {**self.facts, "device": self.device, "full": self.full,
                "no kernel": self.no_kernel, "gemm": self.gemm, "rows": self.results}  # fmt: skip

    def say(self, text, end="\n"):
        print(text, end=end, file=sys.stderr, flush=True)


@pytest.fixture(scope="session")
def session(request):
    config = request.config
    if config.getoption("device") != "cpu" and not torch.cuda.is_available():
        raise pytest.UsageError(f"--device {config.getoption('device')}: torch sees no GPU here")
    session = config.session_of_rows = Session(config)
    for line in report.heading(session.facts, machine.load()):
        session.say(line)
    return session


def pytest_report_teststatus(report, config):
    """The suite's own lines instead of a dot for each row."""
    return ("passed", "", "") if report.passed and report.when == "call" else None


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session):
    """Table, JSON, PNG; with --compare exit code 1 where something got slower."""
    rows = getattr(session.config, "session_of_rows", None)
    if rows is None or not rows.results:
        if rows is not None and rows.no_kernel:
            print(f"no operator asked for has a kernel on {rows.device} in this build: nothing was timed")
        return
    option = session.config.getoption
    name = [machine.slug(rows.facts, rows.device), option("dtype"), option("op").replace(",", "-"), "full" * rows.full]
    slower = report.finish(rows.document(), Path(option("out")), "-".join(filter(None, name)),
                           option("compare"), option("threshold"))  # fmt: skip
    if slower and session.exitstatus == 0:
        session.exitstatus = 1
