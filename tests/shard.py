"""A share of the tests in a process that may die: pytest -p shard --shard 2/12 --log FILE.

Runs the tests whose place in the list is 2 modulo 12, but those that FILE has; FILE gets a line for what each test comes
to. So another process can go on where this one was ended: by a crash, a hang, or an error that left CUDA unusable.
"""

import json
import os
from collections import Counter
from pathlib import Path

import pytest
import torch

POISONED = 99  # exit code: after an error no call of CUDA works in this process
LONGEST = 1500  # characters of a failure's message


def pytest_addoption(parser):
    group = parser.getgroup("shard")
    group.addoption("--shard", default="0/1", help="k/n: the tests whose place is k modulo n")
    group.addoption("--log", help="the file that says what is done, one JSON object a line")


def pytest_configure(config):
    config.pluginmanager.register(Shard(config.getoption("shard"), config.getoption("log")))


class Shard:
    def __init__(self, share, path):
        self.k, self.n = map(int, share.split("/"))
        self.path = Path(path)
        text = self.path.read_text() if self.path.exists() else ""
        self.started = {line["start"] for line in map(json.loads, text.splitlines()) if "start" in line}
        self.left_out, self.result, self.before = Counter(), None, None

    def say(self, **line):
        with self.path.open("a") as log:
            log.write(json.dumps(line) + "\n")

    def pytest_deselected(self, items):
        self.left_out.update(item.path.name for item in items)

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items):
        items.sort(key=worth)
        if self.k == 0 and not self.started:
            self.say(collected=len(items), left_out=self.left_out)
        items[:] = [item for item in items[self.k :: self.n] if item.nodeid not in self.started]

    def pytest_runtest_logstart(self, nodeid):
        self.say(start=nodeid)
        self.result, self.before = {"test": nodeid, "outcome": "passed", "seconds": 0.0}, allocations()

    def pytest_runtest_logreport(self, report):
        self.result["seconds"] = round(self.result["seconds"] + report.duration, 4)
        if report.outcome != "passed" and self.result["outcome"] != "failed":
            self.result |= {"outcome": report.outcome, "message": f"{report.when}: {report.longreprtext}"[-LONGEST:]}

    def pytest_runtest_logfinish(self, nodeid):
        dead = self.result["outcome"] == "failed" and poisoned()
        if self.before is not None and not dead and allocations() == self.before:
            self.result["untouched"] = True  # nothing was allocated on the GPU: it cannot have been tested
        self.say(**self.result, **{"poisoned": True} if dead else {})
        if dead:
            os._exit(POISONED)


def worth(item):
    """What is worth most first: should time run out, the rest is what is not known."""
    return getattr(item, "originalname", "") != "test_matches_the_oracle"


def allocations():
    """How many blocks torch has allocated on the GPU so far; None without a GPU in use."""
    if not torch.cuda.is_initialized():
        return 0 if torch.cuda.is_available() else None
    return torch.cuda.memory_stats().get("allocation.all.allocated", 0)


def poisoned():
    try:
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()
    except RuntimeError:
        return True
    return False
