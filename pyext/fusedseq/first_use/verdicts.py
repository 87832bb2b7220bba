"""What the comparisons of kernels with their oracles have found, on disk: one file for each GPU,
driver, torch and build.

A file that cannot be read counts as empty, and one that cannot be written is left out: then the
comparison is made again in the next process.
"""

import contextlib
import fcntl
import functools
import hashlib
import json
import os
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from fusedseq import _load, kernels

AGREES = "agrees"
LOOP_ALONE = "only the loop agrees"  # of a recurrence: its persistent kernels disagree
DISAGREES = "disagrees"


@dataclass(frozen=True)
class Verdict:
    """found: AGREES, LOOP_ALONE or DISAGREES    why: the first disagreement, or empty"""

    found: str
    why: str = ""


def folder() -> Path:
    """Returns where the files are: below XDG_CACHE_HOME, by default ~/.cache."""
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "fusedseq" / "verdicts"


@functools.cache
def build_hash() -> str:
    """Returns a hash of the compiled operators and of the sources of the Triton kernels."""
    found = hashlib.sha256(_load.LIBRARY.read_bytes())
    for path in sorted(Path(kernels.__file__).parent.rglob("*.py")):
        found.update(path.read_bytes())
    return found.hexdigest()


def driver() -> str:
    """Returns the version of NVIDIA's driver, as exactly as it can be found out."""
    with contextlib.suppress(OSError):
        return Path("/proc/driver/nvidia/version").read_text().splitlines()[0]
    version: Any = torch._C
    return str(version._cuda_getDriverVersion())


def identity_of(device: torch.device) -> dict[str, str]:
    """Returns what a verdict depends on, for a CUDA device."""
    major, minor = torch.cuda.get_device_capability(device)
    return {
        "gpu": torch.cuda.get_device_name(device),
        "capability": f"{major}.{minor}",
        "driver": driver(),
        "torch": torch.__version__,
        "build": build_hash(),
    }


class Verdicts:
    """The verdicts of one GPU, driver, torch and build."""

    def __init__(self, identity: dict[str, str]):
        self.identity = identity
        name = hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()[:16]
        self.path = folder() / f"{name}.json"

    def read(self) -> dict[str, Verdict]:
        """Returns {operator: its verdict}; empty if there is no file, or none that makes sense."""
        try:
            content = json.loads(self.path.read_text())
            if content["identity"] != self.identity:
                return {}
            found = {op: Verdict(**verdict) for op, verdict in content["verdicts"].items()}
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            return {}
        known = (AGREES, LOOP_ALONE, DISAGREES)
        return {op: verdict for op, verdict in found.items() if verdict.found in known}

    def add(self, op: str, verdict: Verdict) -> None:
        """Adds a verdict to the file, which is replaced as a whole. A lock keeps two processes from
        losing each other's verdicts.
        """
        with contextlib.suppress(OSError):
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with open(self.path.with_suffix(".lock"), "w") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX)
                self._replace({**self.read(), op: verdict})

    def _replace(self, verdicts: dict[str, Verdict]) -> None:
        content = {
            "identity": self.identity,
            "verdicts": {op: asdict(verdict) for op, verdict in sorted(verdicts.items())},
        }
        handle, name = tempfile.mkstemp(dir=self.path.parent, suffix=".part")
        try:
            with open(handle, "w") as file:
                json.dump(content, file, indent=1)
            os.replace(name, self.path)
        except OSError:
            os.unlink(name)
            raise
