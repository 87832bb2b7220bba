"""The machine of a benchmark: facts, its name in file names, the load by other processes."""

import os
import re
import resource
import time
from pathlib import Path

import torch
from fusedseq import machine


def facts(device):
    """Returns `fusedseq.machine.facts` with the version of pytest-benchmark, which measures."""
    found = machine.facts(device)
    found["versions"]["pytest-benchmark"] = machine.version("pytest-benchmark")
    return found


def slug(facts, device):
    """Returns the start of a result file's name: GPU or processor, cores, and device type."""
    machine = facts["machine"]
    name = machine["gpu"] or f"{machine['cpu']} {machine['cores']} cores"
    name = re.sub(r"\((r|tm)\)|@.*ghz|processor|cpu ", " ", name.lower())
    return "-".join([*re.findall(r"[a-z0-9.]+", name), torch.device(device).type])


def load():
    """Returns the load average and the cores that others use now, each None if unknown."""
    neighbours = Neighbours()
    time.sleep(0.5)
    return os.getloadavg()[0] if hasattr(os, "getloadavg") else None, neighbours.busy()


class Neighbours:
    """Measures how many cores other processes use, from its construction to `busy()`.

    companion: the process ID of one that belongs to the measurement, or None
    """

    def __init__(self, companion=None):
        self.companion = companion
        self.start, self.seconds_before = time.perf_counter(), cpu_seconds_of_others(companion)

    def busy(self):
        """Returns the average number of cores in use by other processes; None if unknown."""
        if self.seconds_before is None:
            return None
        used = cpu_seconds_of_others(self.companion) - self.seconds_before
        return max(0.0, used) / (time.perf_counter() - self.start)


def cpu_seconds_of_others(companion=None):
    """Returns the CPU time of all processes but this one, its children that have ended, and the
    companion; None if unknown."""
    try:
        jiffies = [int(word) for word in Path("/proc/stat").read_text().split("\n")[0].split()[1:9]]
        jiffies_of_companion = 0
        if companion:
            # The fields after the name in parentheses: state, ..., utime and stime.
            fields = Path(f"/proc/{companion}/stat").read_text().rpartition(")")[2].split()
            jiffies_of_companion = int(fields[11]) + int(fields[12])
    except OSError:
        return None
    own = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    _, _, _, idle, waiting, *_ = jiffies
    busy = sum(jiffies) - idle - waiting - jiffies_of_companion
    everyone = busy / os.sysconf("SC_CLK_TCK")
    return everyone - sum(s.ru_utime + s.ru_stime for s in own)
