"""Prints the Makefile's stamp of a build for this Python, below .stamps; nothing without torch.

A stamp is the file whose time says when the package was last installed. Its name depends on
everything else that a build depends on: the environment, torch, Python, and the variables that
csrc/build.py reads. Where the package is no longer installed, its stamps are removed.

It is run by a python3 that may be of any version, in the top directory of the repository.
"""

import importlib.metadata
import os
import sys
import zlib
from pathlib import Path

VARIABLES = (
    *("FUSEDSEQ_CUDA", "TORCH_CUDA_ARCH_LIST", "CUDA_HOME", "CUDA_PATH"),
    *("CXX", "CXXFLAGS", "LDFLAGS"),
)


def main() -> int:
    """Returns 0, or 1 where there is no torch."""
    try:
        torch = importlib.metadata.version("torch")
    except importlib.metadata.PackageNotFoundError:
        return 1
    facts = [sys.prefix, sys.version, torch, *(os.getenv(name, "") for name in VARIABLES)]
    stamp = Path(".stamps", str(zlib.crc32("\n".join(facts).encode())))
    try:
        importlib.metadata.version("fusedseq")
    except importlib.metadata.PackageNotFoundError:
        for path in (stamp, Path(str(stamp) + "-dev")):
            if path.exists():
                path.unlink()
    print(stamp)
    return 0


if __name__ == "__main__":
    sys.exit(main())
