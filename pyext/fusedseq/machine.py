"""The machine and the software that produced a result, without host name, path or user."""

import datetime
import os
import platform
import re
import subprocess
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from fusedseq import __version__, _load


def gpu_name(device: torch.device | str) -> str | None:
    """The name of a GPU; None for a CPU."""
    device = torch.device(device)
    return torch.cuda.get_device_name(device) if device.type == "cuda" else None


def facts(device: torch.device | str) -> dict[str, Any]:
    """A description of the machine, the software versions and the revision, for result files.

    "commit" and "dirty" describe the clone that the current directory belongs to, where the package
    is imported from that clone; otherwise they are None and false. The variable FUSEDSEQ_COMMIT
    names the revision of a copy of a clean clone, whose own git knows another one or none.
    """
    root = clone()
    commit = os.environ.get("FUSEDSEQ_COMMIT")
    changed = None if commit else git(root, "status", "--porcelain", "--untracked-files=no")
    system = f"{platform.system()} {platform.release().partition('-')[0]} {platform.machine()}"
    return {
        "machine": {
            "cpu": cpu_model(),
            "cores": len(os.sched_getaffinity(0))
            if hasattr(os, "sched_getaffinity")
            else os.cpu_count(),
            "threads": torch.get_num_threads(),
            "isa": isa(),
            "torch isa": torch.backends.cpu.get_cpu_capability(),
            "gpu": gpu_name(device),
            "system": system,
        },
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "fusedseq": __version__,
            "compiler": _load.build_info().get("compiler"),
            "triton": version("triton"),
        },
        "commit": commit or git(root, "rev-parse", "HEAD"),
        "dirty": bool(changed),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    }


def cpu_model() -> str:
    """The processor's name; with family and model number where the name contains no digit.

    Virtual machines often report only a vendor's name.
    """
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return platform.processor() or platform.machine()
    found = dict(re.findall(r"^(model name|cpu family|model)\s*: (.*)$", text, re.M))
    name = found.get("model name", platform.machine())
    if re.search(r"\d", name):
        return name
    return f"{name} family {found.get('cpu family')} model {found.get('model')}"


def isa() -> str | None:
    """The instruction set that the CPU kernels use; None where the operators are not built."""
    try:
        return _load.isa("used")
    except (ImportError, AttributeError):
        return None


def version(distribution: str) -> str | None:
    """The version of an installed distribution; None where it is not installed."""
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def clone() -> Path | None:
    """The clone of the repository that the current directory belongs to.

    It is the current directory or a directory above it. None where the running package is not
    imported from that clone, because the clone's revision then says nothing about the package.
    """
    for folder in (here := Path.cwd(), *here.parents):
        source = folder / "pyext/fusedseq/machine.py"
        if source.is_file() and source.samefile(__file__):
            return folder
    return None


def git(folder: Path | None, *args: str) -> str | None:
    """The output of a git command in a folder; None without a folder, or where git fails."""
    if folder is None:
        return None
    try:
        done = subprocess.run(
            ["git", *args], cwd=folder, capture_output=True, text=True, check=False
        )
    except OSError:
        return None
    return done.stdout.strip() if done.returncode == 0 else None
