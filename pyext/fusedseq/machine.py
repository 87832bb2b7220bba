"""Where and with what a result was made: no host name, no path, no user."""

import datetime
import os
import platform
import re
import subprocess
from importlib import metadata
from pathlib import Path

import torch

from fusedseq import __version__, _load

REPOSITORY = Path(__file__).parents[2]  # where the package lies in its repository


def is_checkout():
    """Whether this package is used from its repository, and not from where it was installed."""
    return (REPOSITORY / "bench/suite.py").is_file()


def facts(device):
    """A description of machine, software and revision, as it goes into a result file."""
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
            "fusedseq": __version__,
            "compiler": _load.build_info().get("compiler"),
            "triton": version("triton"),
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
    """What git says of the package's own repository; None without one."""
    if not is_checkout():
        return None
    try:
        done = subprocess.run(["git", *args], cwd=REPOSITORY, capture_output=True, text=True, check=False)
    except OSError:
        return None
    return done.stdout.strip() if done.returncode == 0 else None
