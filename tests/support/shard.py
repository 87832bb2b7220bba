"""A pytest plugin that runs a share of the tests in a process that may die.

    pytest -p tests.support.shard --shard 2/12 --log FILE

It runs the tests whose index is 2 modulo 12, except those that FILE lists as started. FILE gets one
JSON object a line with the outcome of each test. So a new process can continue after a crash, a
hang, or a CUDA error after which no CUDA call works in the process.
"""

import json
import os
import zlib
from collections import Counter
from pathlib import Path

import pytest
import torch

POISONED = 99  # exit code after an error that left CUDA unusable in this process
LONGEST = 1500  # characters of a failure's message


def pytest_addoption(parser):
    group = parser.getgroup("shard")
    group.addoption("--shard", default="0/1", help="k/n: the tests whose index is k modulo n")
    group.addoption("--log", help="the file of outcomes, one JSON object a line")


def pytest_configure(config):
    config.pluginmanager.register(Shard(config.getoption("shard"), config.getoption("log")))


class Shard:
    def __init__(self, share, path):
        self.k, self.n = map(int, share.split("/"))
        self.path = Path(path)
        text = self.path.read_text() if self.path.exists() else ""
        lines = [json.loads(line) for line in text.splitlines()]
        self.started = {line["start"] for line in lines if "start" in line}
        self.deselected, self.result, self.allocated = Counter(), None, None

    def write(self, **line):
        with self.path.open("a") as log:
            log.write(json.dumps(line) + "\n")

    def pytest_deselected(self, items):
        self.deselected.update(item.path.name for item in items)

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items):
        items.sort(key=priority)
        if self.k == 0 and not self.started:
            self.write(collected=len(items), left_out=self.deselected)
        items[:] = [item for item in items[self.k :: self.n] if item.nodeid not in self.started]

    def pytest_runtest_logstart(self, nodeid):
        self.write(start=nodeid)
        self.result = {"test": nodeid, "outcome": "passed", "seconds": 0.0}
        self.allocated = allocations()

    def pytest_runtest_logreport(self, report):
        self.result["seconds"] = round(self.result["seconds"] + report.duration, 4)
        if report.outcome != "passed" and self.result["outcome"] != "failed":
            message = f"{report.when}: {report.longreprtext}"[-LONGEST:]
            self.result |= {"outcome": report.outcome, "message": message}

    def pytest_runtest_logfinish(self, nodeid):
        poisoned = self.result["outcome"] == "failed" and cuda_is_unusable()
        if self.allocated is not None and not poisoned and allocations() == self.allocated:
            # The test allocated nothing on the GPU, so it cannot have tested the GPU.
            self.result["untouched"] = True
        self.write(**self.result, **{"poisoned": True} if poisoned else {})
        if poisoned:
            os._exit(POISONED)


def priority(item):
    """Sorts the comparison with the oracle first: it tells most if the time runs out. The others
    follow in an order that mixes all files, so that those which ran are a sample of all.
    """
    is_other = getattr(item, "originalname", "") != "test_matches_the_oracle"
    return is_other, zlib.crc32(item.nodeid.encode()) if is_other else 0


def allocations():
    """How many blocks torch has allocated on the GPU so far; None without a GPU."""
    if not torch.cuda.is_initialized():
        return 0 if torch.cuda.is_available() else None
    return torch.cuda.memory_stats().get("allocation.all.allocated", 0)


def cuda_is_unusable():
    try:
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()
    except RuntimeError:
        return True
    return False
