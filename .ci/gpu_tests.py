"""The tests on a GPU, in many processes at once: python .ci/gpu_tests.py --device cuda --out DIR [--shards N] [PYTEST...]

A process that crashes, hangs or has lost its CUDA context is followed by another, which goes on behind the test that did it.
DIR/tests.json: how many passed, failed, were skipped or not reached, what left which file out, and every failure.
Exit code 0 where all that was to run ran and passed.
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

ROOT = Path(__file__).parents[1]
POISONED = 99  # of tests/shard.py
TESTS = "passed", "failed", "skipped", "crashed", "hung"


class Shards:
    def __init__(self, args, pytest):
        self.args, self.pytest = args, pytest
        self.end = time.monotonic() + args.seconds
        self.ended = Counter()

    def run(self):
        threads = [threading.Thread(target=self.follow, args=(k,)) for k in range(self.args.shards)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    def log(self, k):
        return self.args.out / f"shard-{k}.jsonl"

    def follow(self, k):
        """Processes for one share, one after the other, until it is done or time is up."""
        for _ in range(self.args.restarts):
            before = started(self.log(k))
            why = self.process(k)
            last = started(self.log(k))
            if why in ("crashed", "hung") and last and last != before:
                with open(self.log(k), "a") as log:
                    log.write(json.dumps({"test": last, "outcome": why}) + "\n")
            if why in ("done", "late") or last == before:  # one that dies before its first test would do so for ever
                self.ended[why] += 1
                return
        self.ended["restarted too often"] += 1

    def process(self, k):
        """done, late, hung, poisoned or crashed."""
        command = [sys.executable, "-m", "pytest", "-q", "-p", "shard", "-p", "no:cacheprovider", "--tb=short",
                   f"--shard={k}/{self.args.shards}", f"--log={self.log(k)}", f"--device={self.args.device}",
                   *self.pytest]  # fmt: skip
        self.log(k).touch()  # its age is the silence of this process
        with open(self.args.out / f"shard-{k}.txt", "a") as out:
            child = subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT, cwd=ROOT, start_new_session=True)
            while (code := child.poll()) is None:
                time.sleep(0.2)
                now, why = time.monotonic(), None
                if now > self.end:
                    why = "late"
                elif age(self.log(k)) > self.args.hang:
                    why = "hung"
                if why:
                    os.killpg(child.pid, signal.SIGKILL)
                    child.wait()
                    return why
        return {0: "done", 1: "done", 5: "done", POISONED: "poisoned"}.get(code, "crashed")


def age(log):
    return time.time() - log.stat().st_mtime if log.exists() and log.stat().st_size else 0.0


def lines(log):
    return [json.loads(line) for line in log.read_text().splitlines()] if log.exists() else []


def started(log):
    """The last test that was started and not finished, or the last of all."""
    names = [line["start"] for line in lines(log) if "start" in line]
    return names[-1] if names else None


def summary(logs, ended):
    """What the logs of all shares say together."""
    found = [line for log in logs for line in lines(log)]
    results = {line["test"]: line for line in found if "test" in line}
    head = next((line for line in found if "collected" in line), {"collected": 0, "left_out": {}})
    counts = Counter(line["outcome"] for line in results.values())
    slow = sorted(results.values(), key=lambda line: -line.get("seconds", 0))[:20]
    return {
        "collected": head["collected"], **{name: counts[name] for name in TESTS},
        "not reached": head["collected"] - len(results), "processes": dict(ended),
        "left out, as they take no device": head["left_out"],
        "passed, and nothing was allocated on the GPU": sorted(name for name, line in results.items() if line.get("untouched")),
        "failures by test": dict(Counter(name.partition("[")[0] for name, line in results.items()
                                         if line["outcome"] not in ("passed", "skipped")).most_common()),
        "failures": [line for line in results.values() if line["outcome"] not in ("passed", "skipped")],
        "skips": dict(Counter(line["message"][-200:] for line in results.values() if line["outcome"] == "skipped")),
        "slowest": {line["test"]: line.get("seconds") for line in slow},
    }  # fmt: skip


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--shards", type=int, default=max(1, len(os.sched_getaffinity(0)) - 6))
    parser.add_argument("--seconds", type=float, default=160, help="then what has not run is not reached")
    parser.add_argument("--hang", type=float, default=60, help="longest silence of a process")
    parser.add_argument("--restarts", type=int, default=200)
    args, pytest = parser.parse_known_args()
    args.out.mkdir(parents=True, exist_ok=True)
    shards = Shards(args, pytest)
    shards.run()
    found = summary([shards.log(k) for k in range(args.shards)], shards.ended)
    (args.out / "tests.json").write_text(json.dumps(found, indent=1) + "\n")
    print(", ".join(f"{found[name]} {name}" for name in ("collected", *TESTS, "not reached")))
    for name, count in list(found["failures by test"].items())[:30]:
        print(f"  {count} of {name}")
    good = found["passed"] + found["skipped"]
    return int(good < found["collected"] or not found["passed"])


if __name__ == "__main__":
    sys.exit(main())
