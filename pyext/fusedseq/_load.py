"""Finds what fusedseq needs and loads its operators, or says in one sentence what is missing."""

import ctypes
import functools
import importlib
import importlib.metadata
import importlib.util
import json
import os
import re
import sys
from pathlib import Path

PACKAGE = Path(__file__).parent
LIBRARY = PACKAGE / "_ops.so"
TORCH = (2, 11)  # the oldest whose stable ABI the operators are built on


def environment_problem() -> str | None:
    """Why fusedseq can't work here, in a sentence; None where it can. Does not import torch."""
    wanted = ".".join(map(str, TORCH))
    found = importlib.metadata.version("torch") if importlib.util.find_spec("torch") else None
    if found is None:
        return f"fusedseq: needs torch >= {wanted}, found none in {sys.prefix}: pip install 'torch>={wanted}'"
    if tuple(int(n) for n in re.findall(r"\d+", found)[:2]) < TORCH:
        return f"fusedseq: needs torch >= {wanted}, found {found} in {sys.prefix}: pip install 'torch>={wanted}'"
    if not (PACKAGE / "kernels" / "__init__.py").is_file():
        return (
            f"fusedseq: {PACKAGE / 'kernels'} must be the Triton kernels or a link to the folder kernels of the sources, "
            "and is neither: install again from a copy that has symbolic links"
        )
    return None


def require_environment() -> None:
    problem = environment_problem()
    if problem and _is_command():
        raise SystemExit(problem)
    if problem:
        raise ImportError(problem)


def _is_command() -> bool:
    """Whether this process is `fusedseq ...` or `python -m fusedseq ...`, whose user wants no traceback."""
    return Path(sys.argv[0]).name == "fusedseq" or ["-m", "fusedseq"] in [
        sys.orig_argv[i : i + 2] for i in range(len(sys.orig_argv))
    ]


@functools.cache
def operators() -> ctypes.CDLL:
    """Loads _ops.so, which registers torch.ops.fusedseq.*; ImportError, in one sentence, where it can't."""
    import torch

    if not LIBRARY.is_file():
        raise ImportError(
            f"fusedseq: {LIBRARY} is missing, the operators are not built: pip install --no-build-isolation ."
        )
    try:
        torch.ops.load_library(str(LIBRARY))
    except OSError as error:
        built = build_info().get("torch", "unknown")
        reason = " ".join(str(error).split())
        raise ImportError(
            f"fusedseq: {LIBRARY}, built with torch {built}, does not load under torch {torch.__version__}: {reason}"
        ) from None
    return ctypes.CDLL(str(LIBRARY))


@functools.cache
def recorder():
    """The module fusedseq._autograd, or None where the build was for another torch or Python, or FUSEDSEQ_AUTOGRAD is
    python: then Python does the same, and a small call takes some 15 us longer."""
    import torch

    built = build_info().get("torch", "")
    if os.getenv("FUSEDSEQ_AUTOGRAD") == "python" or built.partition("+")[0] != torch.__version__.partition("+")[0]:
        return None
    operators()
    try:
        return importlib.import_module("fusedseq._autograd")
    except ModuleNotFoundError:
        return None


def isa(question: str) -> str:
    """What the operators say of their CPU kernels: `question` is compiled, found (both a list) or used."""
    function = operators()[f"fusedseq_isa_{question}"]
    function.restype = ctypes.c_char_p
    return function().decode()


def empty_cache() -> int:
    """Gives the memory that the CPU operators keep for reuse back to the system; returns how many bytes it was.

    They keep at most 512 MiB, or FUSEDSEQ_CACHE_MB.
    """
    function = operators().fusedseq_empty_cache
    function.restype = ctypes.c_size_t
    return function()


@functools.cache
def build_info() -> dict:
    """The facts of the build that made _ops.so: see csrc/build.py."""
    path = PACKAGE / "build_info.json"
    return json.loads(path.read_text()) if path.is_file() else {}
