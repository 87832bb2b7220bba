"""Wrong calls of the registered operators under AddressSanitizer: none reads or writes outside its
tensors.

The operators and the CPU kernels are compiled once more, with GCC's instrumentation and little
optimization, which takes a minute or two.
"""

import importlib.util
import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from fusedseq import _load

ROOT = Path(__file__).parents[2]
CXX = os.environ.get("CXX", "g++")
PAIRS = 4000  # calls with two wrong arguments
# The instruction sets that GCC compiles the portable kernels for, and their options.
SETS = {"baseline": "", "avx2": "-march=x86-64-v3"}


def runtime(library):
    """The path of a library of the compiler, or None."""
    command = [*CXX.split(), f"-print-file-name={library}"]
    path = Path(subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip())
    return path if path.is_absolute() else None


@pytest.fixture(scope="module", params=SETS)
def library(request, tmp_path_factory):
    """_ops.so with instrumented operators and kernels of an instruction set, without CUDA."""
    isa = request.param
    if isa not in _load.isa("found").split():
        pytest.skip(f"this {platform.machine()} processor does not run {isa}")
    if runtime("libasan.so") is None:
        pytest.skip(f"{CXX} has no libasan")
    out = tmp_path_factory.getbasetemp() / "address_sanitizer"  # the sets share the operators
    spec = importlib.util.spec_from_file_location("fusedseq_build", ROOT / "csrc/build.py")
    build = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(build)
    variables = {
        "builddir": out,
        "cxx": CXX,
        "cxxflags": "-O1 -g1 -fsanitize=address -fno-omit-frame-pointer",
        "ldflags": "-fsanitize=address",
        "torch": Path(torch.__file__).parent,
    }
    ninja = build.NinjaFile(out, variables)
    shared = [
        ninja.edge("operator", f"ops/{source.stem}.o", [source.relative_to(ROOT)])
        for source in sorted((ROOT / "csrc/ops").glob("*.cpp"))
    ]
    shared += [
        ninja.edge("kernel", f"cpu/{name}.o", [Path(f"csrc/cpu/{name}.cpp")])
        for name in ("dispatch", "memory")
    ]
    # Without FUSEDSEQ_X86, dispatch.cpp knows one set of kernels, the one called baseline.
    flags = f"-DFUSEDSEQ_ISA=baseline {SETS[isa]}"
    kernels = ninja.edge("kernel", f"cpu/kernels.{isa}.o", [Path("csrc/cpu/kernels.cpp")], flags)
    found = ninja.edge("link", f"{isa}.so", [*shared, kernels], "$TORCH")
    folder = Path.cwd()
    os.chdir(ROOT)  # the paths of csrc/build.py are relative to it
    try:
        ninja.run()
    finally:
        os.chdir(folder)
    return found


@pytest.mark.sampled(2)
def test_no_wrong_call_touches_foreign_memory(library):
    # libstdc++ comes second, because AddressSanitizer looks up the function that throws exceptions
    # before Python loads it.
    preload = f"{runtime('libasan.so')} {runtime('libstdc++.so')}"
    options = "detect_leaks=0:allocator_may_return_null=1:abort_on_error=0"
    process = subprocess.run(
        [sys.executable, ROOT / "tests/support/direct_calls.py", library, str(PAIRS)],
        env={**os.environ, "LD_PRELOAD": preload, "ASAN_OPTIONS": options},
        capture_output=True,
        text=True,
    )
    assert process.returncode == 0, process.stderr[-6000:]
    assert int(process.stdout.split()[0]) > PAIRS
