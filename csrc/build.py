"""Compiles csrc/ to _ops.so, _C.so and _autograd.so: which sources become which objects. rules.ninja says how each kind is compiled.

Environment: CXX, CXXFLAGS, LDFLAGS, MAX_JOBS, TORCH_CUDA_ARCH_LIST; FUSEDSEQ_CUDA = 0, 1 (an error without nvcc) or auto.
"""

import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
from importlib.metadata import version
from pathlib import Path

CSRC = Path("csrc")
USUAL_TOOLKIT = "/usr/local/cuda"


def cuda_toolkit():
    """The directory of the CUDA toolkit to compile with, or None. No GPU and no CUDA build of torch is asked for."""
    wanted, nvcc = os.getenv("FUSEDSEQ_CUDA", "auto"), shutil.which("nvcc")
    if wanted not in ("0", "1", "auto"):
        raise SystemExit(f"fusedseq: FUSEDSEQ_CUDA must be 0, 1 or auto, got {wanted}")
    if wanted == "0":
        return None
    # The nvcc on PATH may be a script with no toolkit around it: hence the look for the header.
    homes = os.getenv("CUDA_HOME"), os.getenv("CUDA_PATH"), USUAL_TOOLKIT, nvcc and Path(nvcc).resolve().parents[1]
    for home in filter(None, homes):
        if Path(home, "bin/nvcc").is_file() and Path(home, "include/cuda_runtime.h").is_file():
            return Path(home)
    if wanted == "1":
        raise SystemExit("fusedseq: FUSEDSEQ_CUDA=1 needs a CUDA toolkit, nvcc and cuda_runtime.h, in CUDA_HOME, CUDA_PATH, "
                         "/usr/local/cuda or around the nvcc on PATH; none is there")  # fmt: skip
    return None


def output(*command):
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def gencodes(arches):
    """nvcc's options for a TORCH_CUDA_ARCH_LIST: 9.0a is machine code, 9.0+PTX also what newer GPUs can compile."""
    options = []
    for arch in re.split("[; ]+", arches.strip("; ")):
        number = arch.removesuffix("+PTX").replace(".", "")
        kinds = ["sm", "compute"] if arch.endswith("+PTX") else ["sm"]
        options += [f"-gencode=arch=compute_{number},code={kind}_{number}" for kind in kinds]
    return options


def build(out, machine, torch, pybind11):
    """Builds out/_ops.so, out/_C.so and out/_autograd.so for `machine` (x86_64, aarch64, ...); returns the facts for build_info.json.

    torch, pybind11: the directories of these packages
    """
    x86, cu = machine == "x86_64", sorted(CSRC.glob("*.cu"))
    isas = ["baseline", "avx2", "avx512"] if x86 else ["baseline"]
    toolkit = cuda_toolkit()
    cuda = toolkit if cu else None
    codes = gencodes(os.getenv("TORCH_CUDA_ARCH_LIST") or "8.0;9.0a;10.0+PTX") if cuda else []
    cxx = os.getenv("CXX", "g++")
    lines = [
        f"builddir = {out}",
        f"cxx = {cxx}",
        f"cxxflags = {os.getenv('CXXFLAGS', '')}",
        f"ldflags = {os.getenv('LDFLAGS', '')}",
        f"torch = {torch}",
        f"pybind11 = {pybind11}",
        f"python = {sysconfig.get_path('include')}",
        f"cuda = {cuda}",
        f"gencodes = {' '.join(codes)}",
        f"include {CSRC}/rules.ninja",
    ]

    def edge(rule, target, inputs, flags=""):
        paths = [re.sub("([$ :])", r"$\1", str(path)) for path in (out / target, *inputs)]
        lines.append(f"build {paths[0]}: {rule} {' '.join(paths[1:])}\n  flags = {flags}")
        return out / target

    objects = [edge("kernel", "dispatch.o", [CSRC / "cpu/dispatch.cpp"], "-DFUSEDSEQ_X86" if x86 else "")]
    for source in sorted(set(CSRC.glob("cpu/*.cpp")) - {CSRC / "cpu/dispatch.cpp"}):
        for isa in isas:
            flags = f"-DFUSEDSEQ_ISA={isa}" + f" $X86_{isa}" * x86
            objects.append(edge("kernel", f"{source.stem}.{isa}.o", [source], flags))
    for source in sorted(set(CSRC.glob("*.cpp")) - {CSRC / "_C.cpp", CSRC / "_autograd.cpp"}):
        objects.append(edge("operator", f"{source.stem}.o", [source], "$WITH_CUDA" if cuda else ""))
    if cuda:
        objects += [edge("cuda", f"{source.name}.o", [source]) for source in cu]
    edge("link", "_ops.so", objects, "$TORCH" + " $CUDART" * bool(cuda))
    edge("link", "_C.so", [edge("module", "_C.o", [CSRC / "_C.cpp"])])
    edge("link", "_autograd.so", [edge("torch_module", "_autograd.o", [CSRC / "_autograd.cpp"])], "$TORCH_PYTHON")

    out.mkdir(parents=True, exist_ok=True)
    (out / "build.ninja").write_text("\n".join(lines) + "\n")
    jobs = os.getenv("MAX_JOBS") or str(len(os.sched_getaffinity(0)))
    if subprocess.run([sys.executable, "-m", "ninja", "-j", jobs, "-f", str(out / "build.ninja")]).returncode:
        raise SystemExit("fusedseq: the build failed, see the compiler's message above")
    return {
        "machine": machine,
        "compiler": output(*shlex.split(cxx), "--version").splitlines()[0],
        "isas": isas,
        "nvcc": output(f"{cuda}/bin/nvcc", "--version").splitlines()[-2] if cuda else None,
        "cuda_codes": [code.rpartition("code=")[2] for code in codes],
        "ptxas": {source.name: (out / f"{source.name}.o.log").read_text().splitlines() for source in cu if cuda},
        "torch": version("torch"),
        "python": platform.python_version(),
    }
