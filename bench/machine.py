"""The machine of a benchmark: its name for files, what else it is doing; `facts` are the package's."""

import os
import re
import resource
import time
from pathlib import Path

import torch
from fusedseq import machine


def facts(device):
    """`fusedseq.machine.facts`, and the version of what measures."""
    found = machine.facts(device)
    found["versions"]["pytest-benchmark"] = machine.version("pytest-benchmark")
    return found


def slug(facts, device):
    """A file name's first part: the processor that counts, its cores, the device."""
    machine = facts["machine"]
    name = machine["gpu"] or f"{machine['cpu']} {machine['cores']} cores"
    name = re.sub(r"\((r|tm)\)|@.*ghz|processor|cpu ", " ", name.lower())
    return "-".join([*re.findall(r"[a-z0-9.]+", name), torch.device(device).type])


def load():
    """(load average of the last minute, cores in use by others over half a second); None where unknown."""
    neighbours = Neighbours()
    time.sleep(0.5)
    return os.getloadavg()[0] if hasattr(os, "getloadavg") else None, neighbours.busy()


class Neighbours:
    """How many cores other processes keep busy, between its start and `busy()`."""

    def __init__(self):
        self.start, self.others = time.perf_counter(), others_seconds()

    def busy(self):
        """Cores in use by others, on average; None where the system doesn't say."""
        if self.others is None:
            return None
        return max(0.0, others_seconds() - self.others) / (time.perf_counter() - self.start)


def others_seconds():
    """CPU seconds spent by the whole machine except this process and its children; None where unknown."""
    try:
        jiffies = [int(word) for word in Path("/proc/stat").read_text().split("\n")[0].split()[1:9]]
    except OSError:
        return None
    own = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    _, _, _, idle, waiting, *_ = jiffies
    everyone = (sum(jiffies) - idle - waiting) / os.sysconf("SC_CLK_TCK")
    return everyone - sum(s.ru_utime + s.ru_stime for s in own)
