"""Loads the compiled operators, or raises an error that names in one sentence what is missing."""

import atexit
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
from typing import Any

PACKAGE = Path(__file__).parent
LIBRARY = PACKAGE / "_ops.so"
TORCH = (2, 11)  # the oldest torch with the stable ABI that the operators are built on


def environment_problem() -> str | None:
    """Returns why fusedseq cannot work in this environment, in one sentence, or None.

    torch is not imported.
    """
    wanted = ".".join(map(str, TORCH))
    found = torch_version()
    if found is None:
        return (
            f"fusedseq: needs torch >= {wanted}, found none in {sys.prefix}: pip install "
            f"'torch>={wanted}'"
        )
    if tuple(int(n) for n in re.findall(r"\d+", found)[:2]) < TORCH:
        return (
            f"fusedseq: needs torch >= {wanted}, found {found} in {sys.prefix}: pip install "
            f"'torch>={wanted}'"
        )
    if not (PACKAGE / "kernels" / "__init__.py").is_file():
        return (
            f"fusedseq: {PACKAGE / 'kernels'} must be the folder of the Triton kernels or a "
            f"symbolic "
            "link to it, and is neither: install again from a copy that has symbolic links"
        )
    return None


def torch_version() -> str | None:
    """The version of the torch that would be imported, or None."""
    spec = importlib.util.find_spec("torch")
    if spec is None:
        return None
    try:
        return importlib.metadata.version("torch")
    except importlib.metadata.PackageNotFoundError:  # a copy without its metadata
        file = Path(spec.origin or "").with_name("version.py")
        text = file.read_text() if file.is_file() else ""
        found = re.search(r"^__version__ = '(.*)'", text, re.MULTILINE)
        return found[1] if found else None


def require_environment() -> None:
    problem = environment_problem()
    if problem and _is_command():
        raise SystemExit(problem)
    if problem:
        raise ImportError(problem)


def _is_command() -> bool:
    """Returns whether this process is the command `fusedseq ...` or `python -m fusedseq ...`, whose
    errors are printed without a traceback."""
    return Path(sys.argv[0]).name == "fusedseq" or ["-m", "fusedseq"] in [
        sys.orig_argv[i : i + 2] for i in range(len(sys.orig_argv))
    ]


@functools.cache
def operators() -> ctypes.CDLL:
    """Loads _ops.so, which registers torch.ops.fusedseq.*.

    Errors: ImportError if the library was not built, or does not load under this torch; ValueError
    for a wrong FUSEDSEQ_RECURRENCE, FUSEDSEQ_CACHE_MB or FUSEDSEQ_ISA.
    """
    import torch

    variable("FUSEDSEQ_RECURRENCE", "loop")  # read in C++, which takes any other value for none
    _check_cache_size()
    if not LIBRARY.is_file():
        raise ImportError(f"fusedseq: {LIBRARY} is missing, {how_to_build()}")
    try:
        torch.ops.load_library(str(LIBRARY))
    except OSError as error:
        built = build_info().get("torch", "unknown")
        reason = " ".join(str(error.__cause__ or error).split())  # the loader's own words
        raise ImportError(
            f"fusedseq: {LIBRARY}, built with torch {built}, does not load under torch "
            f"{torch.__version__}: {reason}"
        ) from None
    library = ctypes.CDLL(str(LIBRARY))
    if (used := _isa(library, "used")).startswith("error: "):
        raise ValueError(used.removeprefix("error: "))
    if build_info().get("cuda_codes"):
        atexit.register(report_lost_wait, library)
    return library


def _check_cache_size() -> None:
    """Raises ValueError for a wrong FUSEDSEQ_CACHE_MB.

    C++ reads the variable at the first large result, and raises there: in the middle of a run.
    """
    value = os.environ.get("FUSEDSEQ_CACHE_MB", "")
    if value.strip("0123456789"):
        raise ValueError(
            f"FUSEDSEQ_CACHE_MB must be a whole number of MiB, at least 0, got {value!r}"
        )


def report_lost_wait(library: Any) -> None:
    """Prints why the CUDA context of this process is gone, if a kernel has given up waiting.

    The error of such a kernel is raised by whatever call of torch comes next, which knows nothing
    of the reason; the operators themselves raise the reason.
    """
    if reason := lost_wait(library):
        print(f"fusedseq: {reason}", file=sys.stderr)


def lost_wait(library: Any = None) -> str:
    """Why the CUDA context of this process is gone; empty while it is not."""
    function = (library or operators()).fusedseq_lost_wait
    function.restype = ctypes.c_char_p
    reason = function()
    return reason.decode() if reason else ""


def how_to_build() -> str:
    """Says how the operators come into this package, which may be that of a clone."""
    clone = PACKAGE.parent.parent
    if PACKAGE.parent.name == "pyext" and (clone / "setup.py").is_file():
        return (
            "the operators are not built in this clone, whose package comes before an installed "
            f"one here: pip install -v --no-build-isolation -e '{clone}[test]'"
        )
    return "the operators are not built: pip install -v --no-build-isolation ."


@functools.cache
def recorder() -> Any:
    """The module fusedseq._autograd, which records small calls in C++.

    None if the build was for another torch or Python, or if FUSEDSEQ_AUTOGRAD is "python": then
    Python does the same, and a small call takes 15 to 60 us longer (measured manually).
    """
    import torch

    built = build_info().get("torch", "")
    if (
        variable("FUSEDSEQ_AUTOGRAD", "python")
        or built.partition("+")[0] != torch.__version__.partition("+")[0]
    ):
        return None
    operators()
    try:
        return importlib.import_module("fusedseq._autograd")
    except ModuleNotFoundError:
        return None


def variable(name: str, *values: str) -> str | None:
    """The value of an environment variable; None where it is not set, or empty.

    values: those that it may have
    Errors: ValueError for another value
    """
    value = os.environ.get(name)
    if value and value not in values:
        raise ValueError(f"{name} must be {' or '.join(values)}, or not set, got {value!r}")
    return value or None


def isa(question: str) -> str:
    """Returns names of instruction sets of the CPU kernels, separated by spaces.

    question: "compiled", "found" for those of them that this machine runs, or "used" for one name
    """
    return _isa(operators(), question)


def _isa(library: ctypes.CDLL, question: str) -> str:
    """See `isa`; "error: " and the reason where FUSEDSEQ_ISA leaves none to be used."""
    function = library[f"fusedseq_isa_{question}"]
    function.restype = ctypes.c_char_p
    return str(function().decode())


def multiplies_bytes() -> bool:
    """Whether the CPU kernels multiply few rows by weights in 8 bits with dot products of bytes."""
    return isa("used") in ("avx512_bf16", "avx512_amx")


def multiplies_bf16() -> bool:
    """Returns whether the CPU kernels in use have products of bfloat16 numbers."""
    return isa("used").endswith(("_bf16", "_amx"))


def empty_cache() -> int:
    """Returns the memory that the CPU operators cache for reuse to the system.

    At most an eighth of the machine's memory is cached, from 512 MiB to 4 GiB, or
    FUSEDSEQ_CACHE_MB MiB if that variable is set.
    returns: the number of bytes released
    """
    function = operators().fusedseq_empty_cache
    function.restype = ctypes.c_size_t
    return int(function())


@functools.cache
def build_info() -> dict[str, Any]:
    """What csrc/build.py recorded of the build of _ops.so; empty if nothing can be read."""
    try:
        found = json.loads((PACKAGE / "build_info.json").read_text())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}
