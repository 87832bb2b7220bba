"""Lifts the limit that MKL sets itself on AMD processors, in the process that measures.

MKL asks its own function mkl_serv_intel_cpu_true whether the processor is Intel's, and takes its
AVX2 kernels where it is not, also on an AMD processor with AVX-512. A shared library that defines
the function to return 1, preloaded before torch, makes MKL take its AVX-512 kernels. The baselines
then run as fast as on an Intel processor; the fused operators do not call MKL.
"""

import contextlib
import ctypes
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import torch

MODES = ("as-installed", "unthrottled")
BOTH = "both"  # of the operators' suite: as installed, and the baselines in a second process, too
SOURCE = "int mkl_serv_intel_cpu_true(void) { return 1; }\n"


def add_argument(parser, *more):
    parser.add_argument(
        "--mkl",
        choices=[*MODES, *more],
        default=MODES[0],
        help="unthrottled: preload a library that makes MKL use AVX-512 on AMD processors too "
        "(default: %(default)s)",
    )


def is_limited(facts):
    """Returns whether MKL limits itself on the machine of these facts: torch has MKL, and the
    processor is AMD's and has AVX-512."""
    return (
        torch.backends.mkl.is_available()
        and facts["machine"]["cpu"].startswith("AMD")
        and facts["machine"]["torch isa"] == "AVX512"
    )


@contextlib.contextmanager
def environment(mode):
    """Yields the environment variables of a process that measures with MKL in this mode.

    The preloaded library exists only inside the `with` block.
    Errors: OSError or CalledProcessError if the library cannot be compiled ($CC, or cc)
    """
    if mode == "as-installed":
        yield dict(os.environ)
        return
    with tempfile.TemporaryDirectory(prefix="fusedseq-mkl-") as folder:
        source, library = Path(folder) / "mkl_cpu.c", Path(folder) / "libmkl_cpu.so"
        source.write_text(SOURCE)
        compiler = os.environ.get("CC", "cc").split()
        subprocess.run([*compiler, "-shared", "-fPIC", "-o", library, source], check=True)
        preloaded = filter(None, [str(library), os.environ.get("LD_PRELOAD")])
        yield {**os.environ, "LD_PRELOAD": os.pathsep.join(preloaded)}


def run_preloaded(module, argv):
    """Runs `python -m MODULE` in a process with MKL's limit lifted; returns the exit code."""
    try:
        with environment("unthrottled") as variables:
            command = [sys.executable, "-m", module, *argv]
            return subprocess.run(command, env=variables, check=False).returncode
    except (OSError, subprocess.CalledProcessError) as error:
        print(f"--mkl unthrottled: {error}", file=sys.stderr)
        return 2


def is_unthrottled():
    """Returns whether this process has a global mkl_serv_intel_cpu_true that returns 1."""
    try:
        return ctypes.CDLL(None).mkl_serv_intel_cpu_true() == 1
    except (AttributeError, OSError):
        return False


def suffix(mode):
    """The end of a result file's name for this mode."""
    return "" if mode == "as-installed" else f"mkl-{mode}"
