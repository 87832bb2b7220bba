"""make gpu OUT=DIR: build, test, sanitize and benchmark on this GPU, in under 9 minutes.

Every part, and every group of benchmarks, is a process with its own time limit; a part that fails
does not keep the others from running. DIR gets at most five files, each under 16 MB and written
again after every part: NAME.json (all of the benchmarks), NAME.md (the tables of the times, and of
what was verified of each kernel), NAME-tests.json, NAME-sanitizer.txt and NAME-log.txt. The exit
code is 0 if no part failed.

FUSEDSEQ_FAKE_GPU=1 rehearses the same on a CPU: small sizes, few tests, a clock in place of CUDA
events, calls in place of CUDA graphs. Parts named in it, as in
FUSEDSEQ_FAKE_GPU=build,bench-losses, are made to fail.
"""

import argparse
import json
import os
import shutil
import sys
import tempfile
import time
from pathlib import Path

from tools.gpu.device import architecture, unavailable
from tools.gpu.processes import (
    MAX_BYTES,
    ROOT,
    attempt,
    concatenate_logs,
    execute,
    in_parallel,
    last_line,
    read_json,
    shorten,
    text_of,
)

sys.path[:0] = [str(ROOT / "pyext")]
TOTAL_SECONDS = 520.0  # a command of ten minutes may have to copy the sources first
BENCHMARK_SHARE = 0.45  # of the whole time
SANITIZER_TOOLS = "memcheck", "racecheck", "synccheck"
# Shares of the time that is left for the benchmarks, in the order in which the groups run.
SHARES = {"recurrent": 9, "memory": 4, "attention": 7, "losses": 3, "attention-long": 4}
# The folders that have tests which take a device: each process collects them.
TESTS = ["tests/operators", "tests/modules", "tests/triton", "tests/integrations"]
REHEARSAL_TESTS = ["--shards=2", "tests/operators/test_regularizers.py", "-k", "locked_dropout"]


class Run:
    """One `make gpu`: its parts, what became of them, and the result files."""

    def __init__(self, out, fake, only=(), seconds=TOTAL_SECONDS, compile_seconds=None):
        self.out, self.device, self.only = out, "cpu" if fake else "cuda", tuple(only)
        self.seconds, self.compile_seconds = seconds, compile_seconds
        self.fake, self.made_to_fail = bool(fake), set((fake or "").split(","))
        self.start = time.monotonic()
        self.work = Path(tempfile.mkdtemp(prefix="fusedseq-gpu-"))
        self.environment = {
            **os.environ,
            "PYTHONPATH": f"{ROOT / 'pyext'}{os.pathsep}{ROOT}",
            "PYTHONUNBUFFERED": "1",
            # The kernels themselves are tested and timed, also where the comparison at the first
            # use would switch them off; the part first-use makes that comparison.
            "FUSEDSEQ_VERIFY": "off",
            "TORCHINDUCTOR_CACHE_DIR": os.environ.get("TORCHINDUCTOR_CACHE_DIR")
            or str(self.work / "inductor"),
            **({"OMP_NUM_THREADS": "1"} if fake else {}),
        }
        self.parts = []

    def seconds_left(self):
        return self.seconds - (time.monotonic() - self.start)

    def seconds_before_benchmarks(self):
        """Returns the time limit of what runs before the benchmarks."""
        return self.seconds_left() - BENCHMARK_SHARE * self.seconds

    def part(self, name, seconds, *command, summarize=lambda log: "", **environment):
        """Runs a command as a part with a time limit; returns whether it succeeded.

        summarize: makes one line of the part's log for the table of parts
        """
        if self.only and not name.startswith(self.only):
            return None
        began, log = time.monotonic(), self.work / f"{name}.txt"
        print(f"== {name} (at {began - self.start:.0f} s, at most {seconds:.0f} s)", flush=True)
        if self.fake and name in self.made_to_fail:
            command = sys.executable, "-c", f"raise SystemExit('{name}: made to fail')"
        outcome = execute(command, log, seconds, {**self.environment, **environment})
        self.record(name, outcome, time.monotonic() - began, attempt(summarize, log))
        return outcome == "done"

    def record(self, name, outcome, seconds=0.0, summary=""):
        self.parts.append(
            {"name": name, "what": outcome, "seconds": round(seconds, 1), "said": summary}
        )
        print(
            f"== {name}: {outcome}, {seconds:.0f} s{'; ' + summary if summary else ''}", flush=True
        )

    def python(self, name, seconds, *words, **more):
        return self.part(name, seconds, sys.executable, *words, **more)

    def build(self):
        environment = {}
        if not self.fake:
            gpu = architecture(self.environment)
            environment = {"FUSEDSEQ_CUDA": "1", "TORCH_CUDA_ARCH_LIST": gpu}
        command = "setup.py", "-q", "build_ext", "--inplace"
        self.python("build", min(180, self.seconds_left()), *command, **environment)

    def announce(self):
        """Prints what has been verified of each kernel so far, which this run is to complete."""
        from bench.gpu import status

        print(status.table(status.committed_result()), flush=True)

    def facts(self):
        if self.fake:
            self.record("nvidia-smi", "skipped: a rehearsal")
        else:
            self.part("nvidia-smi", 20, "nvidia-smi")
        # The part first-use compares the operators with their oracles.
        self.python("info", 60, "-m", "fusedseq", "info", "--no-check")
        self.bench("ceilings", 40)

    def tests(self):
        seconds = self.seconds_before_benchmarks()
        self.python(
            "tests",
            seconds + 20,
            "-m",
            "tools.gpu.run_tests",
            f"--device={self.device}",
            f"--out={self.work / 'tests'}",
            f"--seconds={seconds}",
            *(REHEARSAL_TESTS if self.fake else TESTS),
            summarize=last_line,
            OMP_NUM_THREADS="1",
        )

    def sanitizer(self):
        """Runs the three tools of compute-sanitizer at once, beside the tests: nothing is timed
        yet.
        """
        program = shutil.which("compute-sanitizer") or shutil.which(
            "compute-sanitizer", path="/usr/local/cuda/bin"
        )
        small_calls = "-m", "tools.gpu.small_calls", self.device
        if self.fake or not program:
            reason = "a rehearsal" if self.fake else "this machine has no compute-sanitizer"
            self.python("small-calls", 60, *small_calls, summarize=last_line)
            self.record("sanitizer", f"skipped: {reason}")
            return
        seconds = self.seconds_before_benchmarks()

        def run_tool(tool):
            # Without torch's caching allocator every tensor is an allocation of its own, so that an
            # access past its end is outside of allocated memory.
            self.part(
                f"sanitizer-{tool}",
                seconds,
                program,
                f"--tool={tool}",
                "--error-exitcode=86",
                "--print-limit=30",
                sys.executable,
                *small_calls,
                summarize=sanitizer_summary,
                PYTORCH_NO_CUDA_MEMORY_CACHING="1",
            )

        in_parallel(run_tool, SANITIZER_TOOLS)

    def first_use(self):
        """Compares the kernels with the oracles as the first call of a user does."""
        seconds = self.seconds_before_benchmarks()
        words = "-m", "tools.gpu.small_calls", self.device
        variables = {"FUSEDSEQ_VERIFY": "always", "OMP_NUM_THREADS": "1"}
        self.python("first-use", seconds, *words, summarize=verdicts, **variables)

    def warm(self):
        """Compiles what the benchmarks need, beside the tests; the compilers' caches keep it."""
        if not self.fake:
            seconds = self.seconds_before_benchmarks()
            in_parallel(lambda group: self.bench(group, seconds, "warm", "--warm"), SHARES)

    def benchmarks(self):
        for i, (group, share) in enumerate(SHARES.items()):
            others = sum([*SHARES.values()][i:])
            self.bench(group, max(5.0, (self.seconds_left() - 10) * share / others))
            self.publish()

    def bench(self, group, seconds, kind="bench", *more):
        name = f"{kind}-{group}"
        limits = [f"--seconds={0.9 * seconds:.0f}"]
        if self.fake:
            limits = ["--compile-seconds=0", "--seconds=50"]
        elif self.compile_seconds is not None:
            limits.append(f"--compile-seconds={self.compile_seconds:.0f}")
        self.python(
            name,
            max(seconds, 60) if self.fake else seconds,
            "-m",
            "bench.gpu.measure",
            group,
            f"--device={self.device}",
            f"--out={self.work / name}.json",
            *limits,
            *more,
            summarize=last_line,
        )

    def result(self):
        """Returns the result so far."""
        found = {"rehearsal": self.fake, "parts": self.parts, "rows": [], "failed": {}}
        found |= read_json(self.work / "bench-ceilings.json")
        for group in SHARES:
            timed = read_json(self.work / f"bench-{group}.json")
            found["rows"] += timed.get("rows", [])
            found["failed"] |= timed.get("failed", {})
        return found

    def publish(self):
        """Writes the result so far; a file that cannot be written does not stop the others."""
        from bench.gpu import report, status
        from bench.suite import machine

        result = self.result()
        card = machine.slug(result["facts"], self.device) if "facts" in result else self.device
        name = "rehearsal-cpu" if self.fake else f"{card}-make-gpu"
        texts = {
            ".json": lambda: json.dumps(result, indent=1) + "\n",
            ".md": lambda: f"{report.markdown(result)}\n{status.table(result)}\n",
            "-tests.json": lambda: text_of(self.work / "tests/tests.json"),
            "-sanitizer.txt": lambda: concatenate_logs(self.work, "sanitizer-*.txt"),
            "-log.txt": lambda: concatenate_logs(self.work, "*.txt"),
        }
        for end, text in texts.items():
            if content := attempt(text):
                (self.out / f"{name}{end}").write_text(shorten(content, MAX_BYTES))
        return result

    def failed_parts(self):
        """Returns the names of the parts that failed; a warm-up that was too slow is no failure."""
        return [
            part["name"]
            for part in self.parts
            if part["what"].startswith("FAILED") and not part["name"].startswith("warm-")
        ]


def sanitizer_summary(log):
    """Returns the tool's own count of errors, and the last line that the program printed."""
    lines = log.read_text(errors="replace").splitlines()
    counts = [
        line.strip("= ") for line in lines if "ERROR SUMMARY" in line or "RACECHECK SUMMARY" in line
    ]
    last = next((line for line in lines[::-1] if line and not line.startswith("=")), "")
    return "; ".join([*counts, last])[:300]


def verdicts(log):
    """Returns the warnings of the comparison, or the program's last line if there is none."""
    lines = log.read_text(errors="replace").splitlines()
    found = [line.strip() for line in lines if "disagree" in line]
    return "; ".join(found)[:2000] or last_line(log)


def main():
    parser = argparse.ArgumentParser(
        prog="python -m tools.gpu.run", description=__doc__.split("\n")[0]
    )
    parser.add_argument("--out", type=Path, default=ROOT / "bench/results")
    parser.add_argument(
        "--only",
        nargs="*",
        default=(),
        metavar="PART",
        help="run only the parts whose names start with one of these",
    )
    parser.add_argument(
        "--seconds",
        type=float,
        default=TOTAL_SECONDS,
        help="time limit of the whole (default: %(default)s)",
    )
    parser.add_argument(
        "--compile-seconds",
        type=float,
        help="time limit of the first call of a peer made by torch.compile; 0: without these peers",
    )
    args = parser.parse_args()
    fake = os.environ.get("FUSEDSEQ_FAKE_GPU")
    if reason := unavailable(fake):
        print(f"make gpu: {reason}", file=sys.stderr)
        return 2
    args.out.mkdir(parents=True, exist_ok=True)
    run = Run(args.out.resolve(), fake, args.only, args.seconds, args.compile_seconds)

    def test_and_warm():
        in_parallel(lambda part: part(), (run.tests, run.sanitizer, run.first_use, run.warm))

    try:
        for step in (run.build, run.announce, run.facts, test_and_warm, run.benchmarks):
            attempt(step)
            attempt(run.publish)
    finally:
        shutil.rmtree(run.work, ignore_errors=True)
    failed = run.failed_parts()
    print(
        f"make gpu: {'failed: ' + ', '.join(failed) if failed else 'all done'}; "
        f"{time.monotonic() - run.start:.0f} s; results are in {run.out}"
    )
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
