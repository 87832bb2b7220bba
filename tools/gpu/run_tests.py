"""Runs the tests on a GPU in many processes at once.

python -m tools.gpu.run_tests --device cuda --out DIR [--shards N] [PYTEST OPTION ...]

A process that crashes, hangs or has lost its CUDA context is replaced by another, which continues
after the test that did it. DIR/tests.json gets the counts of passed, failed, skipped and unreached
tests, the number of tests per file that take no device, and every failure. The exit code is 0 if
every selected test ran and passed.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from pathlib import Path

from tools.gpu.processes import ROOT

POISONED = 99  # exit code of tests/support/shard.py after an error that left CUDA unusable
OUTCOMES = "passed", "failed", "skipped", "crashed", "hung"


class Shards:
    """One thread per shard, which runs one pytest process after the other until the shard is
    done.
    """

    def __init__(self, args, pytest_options):
        self.args, self.pytest_options = args, pytest_options
        self.end = time.monotonic() + args.seconds
        self.endings = Counter()

    def run(self):
        threads = [
            threading.Thread(target=self.run_shard, args=(k,)) for k in range(self.args.shards)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    def log(self, k):
        return self.args.out / f"shard-{k}.jsonl"

    def run_shard(self, k):
        for _ in range(self.args.restarts):
            before = last_started(self.log(k))
            ending = self.run_process(k)
            last = last_started(self.log(k))
            if ending in ("crashed", "hung") and last and last != before:
                with open(self.log(k), "a") as log:
                    log.write(json.dumps({"test": last, "outcome": ending}) + "\n")
            # A process that dies before its first test would do so every time.
            if ending in ("done", "late") or last == before:
                self.endings[ending] += 1
                return
        self.endings["restarted too often"] += 1

    def run_process(self, k):
        """Returns how the process ended: done, late, hung, poisoned or crashed."""
        command = [
            sys.executable,
            "-m",
            "pytest",
            "-q",
            "-p",
            "tests.support.shard",
            "-p",
            "no:cacheprovider",
            "--tb=short",
            "--continue-on-collection-errors",  # of files that need a package which is not here
            f"--shard={k}/{self.args.shards}",
            f"--log={self.log(k)}",
            f"--device={self.args.device}",
            *self.pytest_options,
        ]
        self.log(
            k
        ).touch()  # the time since its last change is how long the process has been silent
        with open(self.args.out / f"shard-{k}.txt", "a") as out:
            child = subprocess.Popen(
                command, stdout=out, stderr=subprocess.STDOUT, cwd=ROOT, start_new_session=True
            )
            while (code := child.poll()) is None:
                time.sleep(0.2)
                ending = None
                if time.monotonic() > self.end:
                    ending = "late"
                elif seconds_of_silence(self.log(k)) > self.args.hang:
                    ending = "hung"
                if ending:
                    os.killpg(child.pid, signal.SIGKILL)
                    child.wait()
                    return ending
        return {0: "done", 1: "done", 5: "done", POISONED: "poisoned"}.get(code, "crashed")


def seconds_of_silence(log):
    return time.time() - log.stat().st_mtime if log.exists() and log.stat().st_size else 0.0


def lines(log):
    return [json.loads(line) for line in log.read_text().splitlines()] if log.exists() else []


def last_started(log):
    """Returns the name of the test that was started last, or None."""
    names = [line["start"] for line in lines(log) if "start" in line]
    return names[-1] if names else None


def summary(logs, endings):
    """Combines the logs of all shards."""
    found = [line for log in logs for line in lines(log)]
    results = {line["test"]: line for line in found if "test" in line}
    head = next((line for line in found if "collected" in line), {"collected": 0, "left_out": {}})
    counts = Counter(line["outcome"] for line in results.values())
    slow = sorted(results.values(), key=lambda line: -line.get("seconds", 0))[:20]
    failures = [line for line in results.values() if line["outcome"] not in ("passed", "skipped")]
    skips = [line["message"][-200:] for line in results.values() if line["outcome"] == "skipped"]
    return {
        "collected": head["collected"],
        **{name: counts[name] for name in OUTCOMES},
        "not reached": head["collected"] - len(results),
        "processes": dict(endings),
        "left out, as they take no device": head["left_out"],
        "passed, and nothing was allocated on the GPU": sorted(
            name for name, line in results.items() if line.get("untouched")
        ),
        "failures by test": dict(
            Counter(line["test"].partition("[")[0] for line in failures).most_common()
        ),
        "failures": failures,
        "skips": dict(Counter(skips)),
        "slowest": {line["test"]: line.get("seconds") for line in slow},
    }


def main():
    parser = argparse.ArgumentParser(
        prog="python -m tools.gpu.run_tests", description=__doc__.split("\n")[0]
    )
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--shards", type=int, default=max(1, len(os.sched_getaffinity(0)) - 3))
    parser.add_argument(
        "--seconds", type=float, default=160, help="tests that have not run by then are not reached"
    )
    parser.add_argument(
        "--hang", type=float, default=60, help="longest time that a process may log nothing"
    )
    parser.add_argument("--restarts", type=int, default=200)
    args, pytest_options = parser.parse_known_args()
    args.out.mkdir(parents=True, exist_ok=True)
    shards = Shards(args, pytest_options)
    shards.run()
    found = summary([shards.log(k) for k in range(args.shards)], shards.endings)
    (args.out / "tests.json").write_text(json.dumps(found, indent=1) + "\n")
    for name, count in list(found["failures by test"].items())[:30]:
        print(f"  {count} of {name}")
    if not found["passed"]:  # no test ran: pytest says why
        print((args.out / "shard-0.txt").read_text()[-4000:])
    # `make gpu` quotes the last line.
    print(", ".join(f"{found[name]} {name}" for name in ("collected", *OUTCOMES, "not reached")))
    good = found["passed"] + found["skipped"]
    return int(good < found["collected"] or not found["passed"])


if __name__ == "__main__":
    sys.exit(main())
