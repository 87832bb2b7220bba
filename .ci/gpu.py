"""make gpu OUT=DIR: build, facts, tests, sanitizer and benchmarks on the GPU of this machine, in under 9 minutes.

Every part and every group of benchmarks is a process with a time limit of its own; one that fails keeps no other from
running. DIR gets at most five files, under 16 MB each, written anew after every part: NAME.json (all of the benchmarks), NAME.md (the
tables), NAME-tests.json, NAME-sanitizer.txt, NAME-log.txt. Exit code 0 where every part did what it should.

FUSEDSEQ_FAKE_GPU=1 rehearses the same on a CPU: small sizes, few tests, clocks for events, calls for graphs. Parts named in
it, as in FUSEDSEQ_FAKE_GPU=build,bench-losses, are made to fail.
"""

import argparse
import contextlib
import importlib.util
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "pyext")]
TOTAL = 520.0  # seconds of everything; a call of ten minutes may have to copy the sources first
LARGEST = 12 << 20  # bytes of a file
TOOLS = "memcheck", "racecheck", "synccheck"
SHARES = {
    "recurrent": 9,
    "memory": 4,
    "attention": 7,
    "losses": 3,
    "attention-long": 4,
}  # of the time left for benchmarks
FEW_TESTS = ["--shards=2", "tests/test_regularizers.py", "-k", "locked_dropout"]


class Run:
    def __init__(self, out, fake, only=()):
        self.out, self.device, self.only = out, "cpu" if fake else "cuda", tuple(only)
        self.fake, self.broken = bool(fake), set((fake or "").split(","))
        self.start = time.monotonic()
        self.work = Path(tempfile.mkdtemp(prefix="fusedseq-gpu-"))
        self.environment = {**os.environ, "PYTHONPATH": f"{ROOT / 'pyext'}{os.pathsep}{ROOT}", "PYTHONUNBUFFERED": "1",
                            "TORCHINDUCTOR_CACHE_DIR": str(self.work / "inductor"),
                            **({"OMP_NUM_THREADS": "1"} if fake else {})}  # fmt: skip
        self.parts = []

    def left(self):
        return TOTAL - (time.monotonic() - self.start)

    def part(self, name, seconds, *command, said=lambda log: "", **environment):
        """Runs a command in a process group of its own, at most so long; whether it did what it should."""
        if self.only and not name.startswith(self.only):
            return None
        began, log = time.monotonic(), self.work / f"{name}.txt"
        print(f"== {name} (at {began - self.start:.0f} s, at most {seconds:.0f} s)", flush=True)
        if self.fake and name in self.broken:
            command = sys.executable, "-c", f"raise SystemExit('{name}: made to fail')"
        what = execute(command, log, seconds, {**self.environment, **environment})
        # What it said may be half a file, where it was killed.
        self.record(name, what, time.monotonic() - began, attempt(said, log))
        return what == "done"

    def record(self, name, what, seconds=0.0, said=""):
        self.parts.append({"name": name, "what": what, "seconds": round(seconds, 1), "said": said})
        print(f"== {name}: {what}, {seconds:.0f} s{'; ' + said if said else ''}", flush=True)

    def python(self, name, seconds, *words, **more):
        return self.part(name, seconds, sys.executable, *words, **more)

    def build(self):
        environment = (
            {} if self.fake else {"FUSEDSEQ_CUDA": "1", "TORCH_CUDA_ARCH_LIST": architecture(self.environment)}
        )
        self.python("build", min(180, self.left()), "setup.py", "-q", "build_ext", "--inplace", **environment)

    def facts(self):
        if self.fake:
            self.record("nvidia-smi", "skipped: a rehearsal")
        else:
            self.part("nvidia-smi", 20, "nvidia-smi")
        self.python("info", 60, "-m", "fusedseq", "info")
        self.bench("ceilings", 40)

    def tests(self):
        seconds = min(170.0, self.left() - 200)
        few = FEW_TESTS if self.fake else []
        self.python("tests", seconds + 20, ".ci/gpu_tests.py", f"--device={self.device}", f"--out={self.work / 'tests'}",
                    f"--seconds={seconds}", *few, said=last_line)  # fmt: skip

    def sanitizer(self):
        """The three tools at once, beside the tests: nothing is timed yet."""
        program = shutil.which("compute-sanitizer") or shutil.which("compute-sanitizer", path="/usr/local/cuda/bin")
        if self.fake or not program:
            why = "a rehearsal" if self.fake else "this machine has no compute-sanitizer"
            self.python("small-calls", 60, ".ci/gpu_small_calls.py", self.device, said=last_line)
            return self.record("sanitizer", f"skipped: {why}")
        seconds = min(170.0, self.left() - 200)
        # Every tensor in an allocation of its own, so that one step past its end is one outside of memory.
        return together(lambda tool: self.part(
            f"sanitizer-{tool}", seconds, program, f"--tool={tool}", "--error-exitcode=86", "--print-limit=30",
            sys.executable, ".ci/gpu_small_calls.py", self.device, said=sanitized, PYTORCH_NO_CUDA_MEMORY_CACHING="1"),
            TOOLS)  # fmt: skip

    def warm(self):
        """Compiles, beside the tests, what the benchmarks will need, so that they find it in the caches."""
        if not self.fake:
            together(lambda group: self.bench(group, min(170.0, self.left() - 200), "warm", "--warm"), SHARES)

    def benchmarks(self):
        for i, (group, share) in enumerate(SHARES.items()):
            seconds = max(5.0, (self.left() - 10) * share / sum([*SHARES.values()][i:]))
            self.bench(group, seconds)
            self.publish()

    def bench(self, group, seconds, kind="bench", *more):
        name = f"{kind}-{group}"
        most = ["--compile-seconds=0", "--seconds=50"] if self.fake else [f"--seconds={0.9 * seconds:.0f}"]
        self.python(name, max(seconds, 60) if self.fake else seconds, "-m", "bench.gpu", group, f"--device={self.device}",
                    f"--out={self.work / name}.json", *most, *more, said=last_line)  # fmt: skip

    def document(self):
        """The result so far."""
        found = {"rehearsal": self.fake, "parts": self.parts, "rows": [], "failed": {}}
        found |= read(self.work / "bench-ceilings.json")
        for group in SHARES:
            timed = read(self.work / f"bench-{group}.json")
            found["rows"] += timed.get("rows", [])
            found["failed"] |= timed.get("failed", {})
        return found

    def publish(self):
        """Writes the result so far; what cannot be written keeps nothing else from it."""
        from bench import gpu_report, machine

        document = self.document()
        card = machine.slug(document["facts"], self.device) if "facts" in document else self.device
        name = "rehearsal-cpu" if self.fake else f"{card}-make-gpu"
        texts = {".json": lambda: json.dumps(document, indent=1) + "\n", ".md": lambda: gpu_report.markdown(document),
                 "-tests.json": lambda: text_of(self.work / "tests/tests.json"),
                 "-sanitizer.txt": lambda: logs(self.work, "sanitizer-*.txt"), "-log.txt": lambda: logs(self.work, "*.txt")}  # fmt: skip
        for end, text in texts.items():
            if written := attempt(text):
                (self.out / f"{name}{end}").write_text(shortened(written, LARGEST))
        return document


def execute(command, log, seconds, environment):
    """done, or what became of it; nothing it started outlives it."""
    try:
        with open(log, "wb") as out:
            child = subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT, cwd=ROOT, env=environment,
                                     start_new_session=True)  # fmt: skip
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
    return "done" if code == 0 else "FAILED: not in time" if code is None else f"FAILED: exit code {code}"


def together(function, names):
    threads = [threading.Thread(target=function, args=(name,)) for name in names]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def attempt(function, *args):
    """What it returns, or "" where it cannot: half a file, or one that was never written."""
    try:
        return function(*args)
    except Exception as error:
        print(f"   {type(error).__name__}: {error}", flush=True)
        return ""


def text_of(path):
    return path.read_text() if path.exists() else ""


def read(path):
    return attempt(json.loads, text_of(path) or "{}") or {}


def last_line(log):
    return log.read_text(errors="replace").strip().rpartition("\n")[2][:200]


def sanitized(log):
    """The tool's own count of errors, and the last call it reached."""
    lines = log.read_text(errors="replace").splitlines()
    counts = [line.strip("= ") for line in lines if "ERROR SUMMARY" in line or "RACECHECK SUMMARY" in line]
    return "; ".join([*counts, next((line for line in lines[::-1] if line and not line.startswith("=")), "")])[:300]


def logs(folder, pattern):
    """The logs of these parts, the oldest first, each shortened so that all have room."""
    paths = sorted(folder.glob(pattern), key=lambda path: path.stat().st_mtime)
    return "".join(f"\n===== {path.stem}\n{shortened(path.read_text(errors='replace'), LARGEST // max(1, len(paths)))}"
                   for path in paths)  # fmt: skip


def shortened(text, most):
    """The text's beginning and end where it is longer than `most` bytes."""
    data, half = text.encode(), most // 2 - 20
    return (
        text
        if len(data) <= most
        else f"{data[:half].decode(errors='ignore')}\n... cut ...\n{data[-half:].decode(errors='ignore')}"
    )


def architecture(environment):
    """The card's, as TORCH_CUDA_ARCH_LIST has it: code for others need not be compiled here."""
    script = "import torch; print(*torch.cuda.get_device_capability(), sep='.')"
    found = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, env=environment, check=False)
    version = found.stdout.strip()
    return environment.get("TORCH_CUDA_ARCH_LIST") or {"9.0": "9.0a"}.get(version, version)


def missing(fake):
    """Why nothing can run here, or None."""
    if importlib.util.find_spec("torch") is None:
        return f"needs torch, which {sys.executable} does not have"
    import torch

    if not fake and not torch.cuda.is_available():
        return "needs a GPU, and torch sees none here; FUSEDSEQ_FAKE_GPU=1 rehearses it on the CPU"
    return None


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path, default=ROOT / "bench/results")
    parser.add_argument("--only", nargs="*", default=(), metavar="PART", help="only the parts whose names begin so")
    args = parser.parse_args()
    fake = os.environ.get("FUSEDSEQ_FAKE_GPU")
    if why := missing(fake):
        print(f"make gpu: {why}", file=sys.stderr)
        return 2
    args.out.mkdir(parents=True, exist_ok=True)
    run = Run(args.out.resolve(), fake, args.only)
    try:
        for step in (
            run.build,
            run.facts,
            lambda: together(lambda f: f(), (run.tests, run.sanitizer, run.warm)),
            run.benchmarks,
        ):
            attempt(step)
            attempt(run.publish)
    finally:
        shutil.rmtree(run.work, ignore_errors=True)
    failed = [part["name"] for part in run.parts
              if part["what"].startswith("FAILED") and not part["name"].startswith("warm-")]  # fmt: skip
    print(f"make gpu: {'failed: ' + ', '.join(failed) if failed else 'all done'}; {time.monotonic() - run.start:.0f} s; "
          f"results are in {run.out}")  # fmt: skip
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
