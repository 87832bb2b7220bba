"""Compiles csrc/ to _ops.so, _C.so and _autograd.so with ninja.

This file decides which sources become which objects; rules.ninja says how each kind of source is
compiled.

Environment variables:
    CXX, CXXFLAGS, LDFLAGS: the C++ compiler and additional flags
    MAX_JOBS: the number of parallel compilations; the number of usable cores by default
    FUSEDSEQ_CUDA: 0 (without CUDA), 1 (with CUDA; an error without a toolkit) or auto, the default:
        with CUDA where there is a toolkit and torch is a CUDA build or the machine has a GPU
    TORCH_CUDA_ARCH_LIST: the GPU architectures, as numbers or names, as for torch's own extensions
"""

from __future__ import annotations

import fcntl
import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Iterable
from importlib.metadata import version
from pathlib import Path
from typing import Any

CSRC = Path("csrc")
USUAL_TOOLKIT = "/usr/local/cuda"
TOOLKIT = (
    f"bin/nvcc and include/cuda_runtime.h in CUDA_HOME, CUDA_PATH, {USUAL_TOOLKIT} or around the "
    "nvcc on PATH"
)
DEFAULT_ARCHITECTURES = "8.0;9.0a;10.0+PTX;12.0"
OLDEST_ARCHITECTURE = 80
# Names that torch's own extensions accept, of GPUs that have kernels here.
NAMED_ARCHITECTURES = {
    "Ampere": "8.0;8.6+PTX",
    "Ada": "8.9+PTX",
    "Hopper": "9.0+PTX",
    "Blackwell+Tegra": "11.0",
    "Blackwell": "10.0;10.3;12.0;12.1+PTX",
}


def is_cuda_build(torch: Path) -> bool:
    """Returns whether the torch in this directory was built with CUDA, without importing it."""
    version = torch / "version.py"
    text = version.read_text() if version.is_file() else ""
    found = re.search(r"^cuda\b[^=\n]*=\s*(.+?)\s*$", text, re.MULTILINE)
    return bool(found) and found[1] != "None"


def has_gpu() -> bool:
    """Returns whether this machine has an NVIDIA GPU that its driver sees."""
    tool = shutil.which("nvidia-smi")
    if tool and subprocess.run([tool, "-L"], capture_output=True).returncode == 0:
        return True
    return any(Path("/dev").glob("nvidia[0-9]*"))


def cuda_toolkit(torch: Path) -> Path | None:
    """Returns the directory of the CUDA toolkit to compile with, or None to compile without CUDA.

    With FUSEDSEQ_CUDA=1 neither a GPU nor a CUDA build of torch is needed.
    torch: the directory of the package
    """
    mode, nvcc = os.getenv("FUSEDSEQ_CUDA") or "auto", shutil.which("nvcc")
    if mode not in ("0", "1", "auto"):
        raise SystemExit(f"fusedseq: FUSEDSEQ_CUDA must be 0, 1 or auto, got {mode}")
    if mode == "0" or (mode == "auto" and not is_cuda_build(torch) and not has_gpu()):
        return None
    candidates = (
        os.getenv("CUDA_HOME"),
        os.getenv("CUDA_PATH"),
        USUAL_TOOLKIT,
        nvcc and Path(nvcc).resolve().parents[1],
    )
    for directory in filter(None, candidates):
        # The nvcc on PATH may be a wrapper script outside of any toolkit: look for the header, too.
        nvcc_found = Path(directory, "bin/nvcc").is_file()
        if nvcc_found and Path(directory, "include/cuda_runtime.h").is_file():
            return Path(directory)
    if mode == "1":
        raise SystemExit(
            f"fusedseq: FUSEDSEQ_CUDA=1 needs a CUDA toolkit, that is {TOOLKIT}; none was found"
        )
    return None


def architectures(listed: str) -> list[str]:
    """Returns the entries of a value of TORCH_CUDA_ARCH_LIST such as 9.0a or 10.0+PTX.

    Entries for GPUs that are too old are left out, with a message.
    """
    entries: list[str] = []
    for entry in re.split("[;, ]+", listed.strip(";, ")):
        entries += NAMED_ARCHITECTURES.get(entry, entry).split(";")
    for entry in entries:
        if not re.fullmatch(r"\d+\.\d[af]?(\+PTX)?", entry):
            raise SystemExit(
                "fusedseq: TORCH_CUDA_ARCH_LIST must hold numbers such as 9.0a or 10.0+PTX, or "
                f"names among {', '.join(NAMED_ARCHITECTURES)}, got {entry}"
            )
    old = [entry for entry in entries if base_number(entry) < OLDEST_ARCHITECTURE]
    if old:
        print(f"fusedseq: there are no kernels for the GPUs {', '.join(old)}", flush=True)
    if len(old) == len(entries):
        raise SystemExit(f"fusedseq: TORCH_CUDA_ARCH_LIST must hold 8.0 or more, got {listed}")
    return [entry for entry in entries if entry not in old]


def base_number(architecture: str) -> int:
    """Returns 90 for 9.0, 9.0a and 9.0+PTX."""
    return int(re.sub(r"\D", "", architecture.removesuffix("+PTX")))


def default_architectures(nvcc: Path) -> list[str]:
    """Returns the default architectures that this nvcc knows, the newest of them with PTX.

    An nvcc before 12.8 does not know 10.0 and 12.0.
    """
    found = subprocess.run([str(nvcc), "--list-gpu-code"], capture_output=True, text=True)
    known = {int(n) for n in re.findall(r"sm_(\d+)", found.stdout)}
    entries = architectures(DEFAULT_ARCHITECTURES)
    missing = [entry for entry in entries if known and base_number(entry) not in known]
    if not missing:
        return entries
    entries = [entry for entry in entries if entry not in missing]
    print(
        f"fusedseq: {nvcc} compiles for {', '.join(entries)} and not for {', '.join(missing)}; "
        "CUDA 12.8 or later does",
        flush=True,
    )
    if not any(entry.endswith("+PTX") for entry in entries):
        # PTX of an architecture with `a` runs on no other GPU.
        entries.append(re.sub("[af]$", "", entries[-1]) + "+PTX")
    return entries


def gencodes(architectures: Iterable[str]) -> list[str]:
    """Returns nvcc's -gencode options.

    9.0a stands for machine code; 9.0+PTX adds PTX, which the driver compiles for newer GPUs.
    """
    options = []
    for architecture in architectures:
        number = architecture.removesuffix("+PTX").replace(".", "")
        kinds = ["sm", "compute"] if architecture.endswith("+PTX") else ["sm"]
        options += [f"-gencode=arch=compute_{number},code={kind}_{number}" for kind in kinds]
    return options


def instruction_sets(machine: str) -> list[str]:
    """Returns the instruction sets for which the CPU kernels are compiled on `machine`."""
    return {
        "x86_64": ["baseline", "avx2", "avx512", "avx512_bf16", "avx512_amx"],
        "aarch64": ["baseline", "baseline_bf16"],
    }.get(machine, ["baseline"])


def job_count() -> int:
    """Returns the number of parallel compilations: MAX_JOBS, or the number of usable cores."""
    text = os.getenv("MAX_JOBS") or str(len(os.sched_getaffinity(0)))
    if not text.isdecimal() or int(text) < 1:
        raise SystemExit(f"fusedseq: MAX_JOBS must be a number from 1, got {text}")
    return int(text)


class NinjaFile:
    """The text of a build.ninja file in the making."""

    def __init__(self, out: Path, variables: dict[str, Any]) -> None:
        """out: the directory of the objects; variables: those that rules.ninja uses."""
        self._out, self._edges = out, 0
        self._lines = [f"{name} = {value}" for name, value in variables.items()]
        self._lines.append(f"include {CSRC}/rules.ninja")

    def edge(
        self,
        rule: str,
        target: str,
        inputs: Iterable[Path],
        flags: str = "",
        implicit: Iterable[Path] = (),
    ) -> Path:
        """Adds the build of out/target from `inputs` by a rule of rules.ninja; returns its path.

        implicit: other files that the target depends on, which are no arguments of the rule
        """

        def escaped(paths: Iterable[Path]) -> str:
            return " ".join(re.sub("([$ :])", r"$\1", str(path)) for path in paths)

        path = self._out / target
        more = f" | {escaped(implicit)}" if implicit else ""
        self._lines.append(f"build {escaped([path])}: {rule} {escaped(inputs)}{more}")
        self._lines.append(f"  flags = {flags}")
        self._edges += 1
        return path

    def run(self) -> None:
        """Writes the file and runs ninja; exits with a message if a compilation fails."""
        self._out.mkdir(parents=True, exist_ok=True)
        file = self._out / "build.ninja"
        file.write_text("\n".join(self._lines) + "\n")
        jobs = job_count()
        command = [sys.executable, "-m", "ninja", "-j", str(jobs), "-f", str(file)]
        # ninja prints a line per source, or on a terminal one line that changes.
        parallel = "one after the other" if jobs == 1 else f"{jobs} at a time"
        print(f"fusedseq: {self._edges} steps, {parallel}", flush=True)
        with open(self._out / "lock", "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # two builds of this tree take turns
            if subprocess.run(command).returncode:
                raise SystemExit("fusedseq: the build failed, see the compiler's message above")


def add_kernels(ninja: NinjaFile, machine: str) -> list[Path]:
    """Adds the CPU kernels, once per instruction set; dispatch.cpp chooses one set at run time."""
    machines = {"x86_64": "X86", "aarch64": "AARCH64"}  # those with more than one set
    name = machines.get(machine)

    def object_of(source: str, suffix: str, flags: str) -> Path:
        return ninja.edge("kernel", f"cpu/{source}{suffix}.o", [CSRC / f"cpu/{source}.cpp"], flags)

    objects = [object_of("dispatch", "", f"-DFUSEDSEQ_{name}" if name else "")]
    objects.append(object_of("memory", "", ""))
    for isa in instruction_sets(machine):
        flags = f"-DFUSEDSEQ_ISA={isa}" + (f" ${name}_{isa}" if name else "")
        source = "kernels_bf16" if isa.endswith(("_bf16", "_amx")) else "kernels"
        objects.append(object_of(source, f".{isa}", flags))
    return objects


def add_libraries(ninja: NinjaFile, machine: str, cuda_sources: list[Path], cuda: bool) -> None:
    """Adds _ops.so (kernels, operators, CUDA sources) and the modules _C.so and _autograd.so."""

    def system(name: str) -> Path:
        return ninja.edge("system", f"linux/{name}.o", [CSRC / f"linux/{name}.cpp"])

    c_symbols, cxx_symbols = system("c_symbols"), system("cxx_symbols")
    objects = [*add_kernels(ninja, machine), c_symbols, cxx_symbols]
    for source in sorted(CSRC.glob("ops/*.cpp")):
        flags = "$WITH_CUDA" if cuda else ""
        objects.append(ninja.edge("operator", f"ops/{source.stem}.o", [source], flags))
    if cuda:
        objects += [
            ninja.edge("cuda", f"cuda/{source.name}.o", [source]) for source in cuda_sources
        ]
        objects.append(system("cuda_runtime_symbols"))
    symbols = [CSRC / "linux/local_symbols.map"]
    ninja.edge("link", "_ops.so", objects, "$TORCH" + " $CUDART" * cuda, symbols)
    for name, rule, old_symbols, flags in (
        ("_C", "module", [cxx_symbols], ""),
        ("_autograd", "torch_module", [cxx_symbols, c_symbols], "$TORCH_PYTHON"),
    ):
        module = ninja.edge(rule, f"python/{name}.o", [CSRC / f"python/{name}.cpp"])
        ninja.edge("link", f"{name}.so", [module, *old_symbols], flags, symbols)


def in_shell(path: str | Path) -> str:
    """Returns a path as a part of the commands of rules.ninja."""
    return shlex.quote(str(path)).replace("$", "$$")


def output(*command: str) -> str:
    """Returns what a command writes to stdout."""
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def why_without_cuda(torch: Path) -> str:
    """Returns why a build has no CUDA kernels, as the end of a sentence."""
    if os.getenv("FUSEDSEQ_CUDA") == "0":
        return "FUSEDSEQ_CUDA is 0"
    if is_cuda_build(torch) or has_gpu():
        return f"there is no CUDA toolkit, that is {TOOLKIT}"
    return "FUSEDSEQ_CUDA=1 compiles those for CUDA too"


def build(out: Path, machine: str, torch: Path, pybind11: Path) -> dict[str, Any]:
    """Builds out/_ops.so, out/_C.so and out/_autograd.so; returns the contents of build_info.json.

    machine: x86_64, aarch64, ...
    torch, pybind11: the directories of these packages
    """
    cuda_sources = sorted(CSRC.glob("cuda/**/*.cu"))
    toolkit = cuda_toolkit(torch)
    cuda = toolkit if cuda_sources else None
    kernels = f"of the CPU and for CUDA with {cuda}" if cuda else "of the CPU only"
    remark = "" if cuda else f"; {why_without_cuda(torch)}"
    print(f"fusedseq: compiling the kernels {kernels}{remark}", flush=True)
    codes = []
    if cuda:
        listed = (os.getenv("TORCH_CUDA_ARCH_LIST") or "").strip(";, ")
        nvcc = cuda / "bin/nvcc"
        codes = gencodes(architectures(listed) if listed else default_architectures(nvcc))
    cxx = os.getenv("CXX") or "g++"
    if not shutil.which(shlex.split(cxx)[0]):
        raise SystemExit(
            "fusedseq: a build needs g++ 12 or later, or another compiler in CXX; there is no "
            f"{cxx}"
        )
    variables = {
        "builddir": out,
        "cxx": cxx,
        "cxxflags": os.getenv("CXXFLAGS", ""),
        "ldflags": os.getenv("LDFLAGS", ""),
        "torch": in_shell(torch),
        "torch_version": version("torch"),
        "pybind11": in_shell(pybind11),
        "pybind11_version": version("pybind11"),
        "python": in_shell(sysconfig.get_path("include")),
        "cuda": in_shell(cuda) if cuda else "",
        "gencodes": " ".join(codes),
    }
    ninja = NinjaFile(out, variables)
    add_libraries(ninja, machine, cuda_sources, bool(cuda))
    ninja.run()
    return {
        "machine": machine,
        "compiler": output(*shlex.split(cxx), "--version").splitlines()[0],
        "isas": instruction_sets(machine),
        "nvcc": output(f"{cuda}/bin/nvcc", "--version").splitlines()[-2] if cuda else None,
        "cuda_codes": [code.rpartition("code=")[2] for code in codes],
        "ptxas": {
            source.name: (out / f"cuda/{source.name}.o.log").read_text().splitlines()
            for source in cuda_sources
            if cuda
        },
        "torch": version("torch"),
        "python": platform.python_version(),
    }
