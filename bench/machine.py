"""Where and with what a result was measured, and whether the machine was quiet. No host name, no path, no user."""

import datetime
import os
import platform
import re
import resource
import subprocess
import time
from importlib import metadata
from pathlib import Path

import fusedseq
import torch
from fusedseq import _load

REPOSITORY = Path(__file__).parents[1]


def facts(device):
    """A description of machine, software and revision, as it goes into the result file."""
    return {
        "machine": {
            "cpu": cpu_model(),
            "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
            "threads": torch.get_num_threads(),
            "isa": isa(),
            "torch isa": torch.backends.cpu.get_cpu_capability(),
            "gpu": torch.cuda.get_device_name() if torch.device(device).type == "cuda" else None,
            "system": f"{platform.system()} {platform.release().partition('-')[0]} {platform.machine()}",
        },
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "fusedseq": fusedseq.__version__,
            "compiler": _load.build_info().get("compiler"),
            "triton": version("triton"),
            "pytest-benchmark": version("pytest-benchmark"),
        },
        "commit": git("rev-parse", "HEAD"),
        "dirty": bool(git("status", "--porcelain", "--untracked-files=no")),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    }


def cpu_model():
    """The processor's name, with its family and model number where the name says little (as in virtual machines)."""
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return platform.processor() or platform.machine()
    found = dict(re.findall(r"^(model name|cpu family|model)\s*: (.*)$", text, re.M))
    name = found.get("model name", platform.machine())
    return name if re.search(r"\d", name) else f"{name} family {found.get('cpu family')} model {found.get('model')}"


def slug(facts, device):
    """A file name's first part: the processor that counts, its cores, the device."""
    machine = facts["machine"]
    name = machine["gpu"] or f"{machine['cpu']} {machine['cores']} cores"
    name = re.sub(r"\((r|tm)\)|@.*ghz|processor|cpu ", " ", name.lower())
    return "-".join([*re.findall(r"[a-z0-9.]+", name), torch.device(device).type])


def isa():
    """The instruction set our CPU kernels use; None where the operators aren't built."""
    try:
        return _load.isa("used")
    except (ImportError, AttributeError):
        return None


def version(distribution):
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def git(*args):
    try:
        done = subprocess.run(["git", *args], cwd=REPOSITORY, capture_output=True, text=True, check=False)
    except OSError:
        return None
    return done.stdout.strip() if done.returncode == 0 else None


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
