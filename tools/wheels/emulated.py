"""Runs the wheel for aarch64 on an x86-64 machine, by QEMU's emulation of single programs.

    python -m tools.wheels.emulated dist/fusedseq-...-aarch64.whl [--cpu NAME ...] [PROGRAM ...]

It makes a directory with the wheel, a Python and the C libraries of Debian for arm64, and torch for
aarch64, and runs `fusedseq info` there for every --cpu, or PROGRAM (the arguments of that Python,
after a `--`). It needs Debian's apt-get and its packages qemu-user-static and
g++-aarch64-linux-gnu; nothing is installed on this system. The exit code is 0 if nothing failed,
also where the environment cannot be made: then a line begins with NOT CHECKED.

Wheels of torch for aarch64 are CUDA builds. Of the CUDA libraries that they are linked with,
gigabytes, nothing is called without a GPU: a stand-in defines their symbols as functions that
return 100, cudaErrorNoDevice.
"""

import argparse
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path

from tools.wheels.__main__ import run
from tools.wheels.symbols import readelf, uses

TOOLS = ("qemu-aarch64-static", "aarch64-linux-gnu-gcc", "apt-get", "dpkg-deb", "readelf")
# {QEMU's name of a processor: the kernels that must be used on it}. The first has the instruction
# bfdot, the second does not. In fp32 both have the same kernels, so the first computes in bf16.
# The BLAS in torch's wheel, NVIDIA's NVPL, does not run on processors as old as cortex-a57.
PROCESSORS = {"max": "baseline_bf16", "neoverse-n1": "baseline"}
DTYPES = {"max": "bfloat16"}  # for others fp32
# What QEMU shows as a processor in /proc/cpuinfo instead of that of this machine, which has no
# fields of an Arm processor: torch 2.13 crashes when it is imported without them.
CPUINFO = """processor\t: {number}
BogoMIPS\t: 50.00
Features\t: fp asimd aes pmull sha1 sha2 crc32 atomics fphp asimdhp cpuid asimdrdm
CPU implementer\t: 0x41
CPU architecture: 8
CPU variant\t: 0x3
CPU part\t: 0xd0c
CPU revision\t: 1

"""
VERSION = "{}.{}".format(*sys.version_info)
DEBIAN = (
    *(f"python{VERSION}-minimal", f"libpython{VERSION}-minimal", f"libpython{VERSION}-stdlib"),
    *("libc6", "libgcc-s1", "libstdc++6", "libgomp1", "zlib1g", "libexpat1", "libffi8"),
    *("libssl3", "libbz2-1.0", "liblzma5", "libuuid1", "libsqlite3-0", "libtinfo6"),
)
# What torch and this package import.
PYTHON_PACKAGES = (
    *("typing_extensions", "sympy", "mpmath", "networkx", "jinja2", "markupsafe", "filelock"),
    *("fsspec", "numpy"),
)
PLATFORMS = ("manylinux_2_28", "manylinux_2_27", "manylinux2014", "manylinux_2_17")


def missing() -> str | None:
    """Returns what this machine lacks for an emulation, in words; None if it has everything."""
    if platform.machine() != "x86_64":
        return f"this machine is {platform.machine()}, not x86_64"
    tools = [tool for tool in TOOLS if not shutil.which(tool)]
    return f"this machine has no {', '.join(tools)}" if tools else None


def unpack_debian(root: Path) -> None:
    """Unpacks Debian's packages for arm64, with lists and a cache of apt-get's own in `root`, and
    writes a description of an Arm processor."""
    state = root / "apt"
    for folder in ("state/lists/partial", "cache/archives/partial"):
        (state / folder).mkdir(parents=True)
    options = [
        *("-qq", "-o", "APT::Architecture=arm64", "-o", "APT::Architectures::=arm64"),
        *("-o", f"Dir::State={state / 'state'}", "-o", f"Dir::Cache={state / 'cache'}"),
        *("-o", "Dir::State::status=/dev/null", "-o", "APT::Sandbox::User=root"),
    ]
    run("apt-get", *options, "update")
    run("apt-get", *options, "download", *DEBIAN, cwd=state)
    for package in state.glob("*.deb"):
        run("dpkg-deb", "-x", package, root)
    (root / "proc").mkdir()
    text = "".join(CPUINFO.format(number=number) for number in range(os.cpu_count() or 1))
    (root / "proc/cpuinfo").write_text(text)


def install(site: Path, *packages: str | Path) -> None:
    """Installs packages into a directory, without what they depend on; runs nothing of them."""
    options = [
        *("install", "-q", "--no-deps", "--no-compile", "--only-binary=:all:", "--upgrade"),
        *("--disable-pip-version-check", "--implementation=cp", f"--python-version={VERSION}"),
        *(f"--platform={name}_aarch64" for name in PLATFORMS),
        *("--target", site),
    ]
    run(sys.executable, "-m", "pip", *options, *packages)


def defined_and_undefined(library: Path) -> tuple[set[str], set[str]]:
    """The names that a library defines, and those that it must have from others."""
    defined, undefined = set(), set()
    for line in readelf("--dyn-syms", library).splitlines():
        # Number, value, size, type, binding, visibility, section, name@version (index).
        fields = line.split()
        if len(fields) >= 8 and fields[0].rstrip(":").isdigit():
            name = fields[7].partition("@")[0]
            if fields[6] != "UND":
                defined.add(name)
            elif fields[4] != "WEAK":
                undefined.add(name)
    return defined, undefined


def stand_in_for_cuda(root: Path, site: Path) -> Path | None:
    """Makes libraries that stand in for those of CUDA; returns the one to be preloaded.

    It defines the symbols. The libraries of the names that torch is linked with are empty, since
    the loader would demand versioned symbols of them.
    """
    present = {p.name for p in [*site.rglob("*.so*"), *root.rglob("*.so*")]}
    libraries = [*(site / "torch/lib").glob("*.so*")]
    absent = {n for library in libraries for n in uses(library).libraries} - present
    if not absent:
        return None
    defined, undefined = set(), set()
    program = root / f"usr/bin/python{VERSION}"  # defines Python's own interface
    others = [*root.glob("lib/aarch64-linux-gnu/*.so*"), *root.glob("usr/lib/*-gnu/*.so*"), program]
    for library in [*libraries, *others]:
        of_library = defined_and_undefined(library)
        defined |= of_library[0]
        undefined |= of_library[1] if library in libraries else set()
    folder = root / "stand-ins"
    folder.mkdir()
    source = folder / "symbols.c"
    names = sorted(name for name in undefined - defined if name.isidentifier())
    source.write_text("".join(f"int {name}(void) {{ return 100; }}\n" for name in names))
    compiler = ["aarch64-linux-gnu-gcc", "-shared", "-fPIC", "-w", "-nostdlib", "-fno-builtin"]
    run(*compiler, "-o", folder / "libsymbols.so", source)
    for name in absent:
        run(*compiler, f"-Wl,-soname,{name}", "-o", folder / name, "-x", "c", "/dev/null")
    return folder / "libsymbols.so"


def python_command(root: Path, preloaded: Path | None) -> list[str]:
    """Returns the command that starts the emulated Python, without the name of the emulator and its
    choice of a processor."""
    variables = {
        "PYTHONHOME": root / "usr",
        "PYTHONPATH": root / "site-packages",
        "PYTHONDONTWRITEBYTECODE": "1",
        "LD_LIBRARY_PATH": root / "stand-ins",
        # The programs run at the same time, and threads that wait for each other spin.
        "OMP_NUM_THREADS": "1",
        **({"LD_PRELOAD": preloaded} if preloaded else {}),
    }
    given = [part for name, value in variables.items() for part in ("-E", f"{name}={value}")]
    return ["-L", str(root), *given, str(root / f"usr/bin/python{VERSION}")]


def info_of(cpu: str) -> list[str]:
    """Returns the arguments with which Python runs `fusedseq info` for a processor."""
    return ["-m", "fusedseq", "info", "--dtype", DTYPES.get(cpu, "float32")]


def failures(programs: dict[str, list[str]], root: Path, kernels: dict[str, str]) -> list[str]:
    """Runs programs at the same time, each on its processor; returns a sentence for each that
    failed.

    programs: {QEMU's name of a processor: the arguments of the emulator}
    kernels: {QEMU's name of a processor: the kernels that `fusedseq info` must say it uses}
    """
    processes = {
        cpu: subprocess.Popen(
            ["qemu-aarch64-static", "-cpu", cpu, *program],
            cwd=root,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for cpu, program in programs.items()
    }
    found = []
    for cpu, process in processes.items():
        output, _ = process.communicate()
        print(f"\nemulated processor: {cpu}\n{output}", flush=True)
        if process.returncode:
            found.append(f"the program on {cpu} has failed with code {process.returncode}")
        elif cpu in kernels and not re.search(rf"^CPU kernels used +{kernels[cpu]},", output, re.M):
            found.append(f"the kernels used on {cpu} must be {kernels[cpu]}")
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m tools.wheels.emulated",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("wheel", type=Path)
    parser.add_argument("--cpu", action="append", help=f"by default {' and '.join(PROCESSORS)}")
    built_with = f"torch=={version('torch').partition('+')[0]}"
    parser.add_argument("--torch", default=built_with, help="by default %(default)s")
    parser.add_argument("--root", type=Path, help="where to make the directory, which is then left")
    parser.add_argument("program", nargs="*", help="by default -m fusedseq info")
    args = parser.parse_args()
    not_checked = "NOT CHECKED: the wheel for aarch64 under emulation, since"
    if reason := missing():
        print(f"{not_checked} {reason}")
        return
    with tempfile.TemporaryDirectory() as temporary:
        root = (args.root or Path(temporary)).resolve()
        try:
            unpack_debian(root)
            install(root / "site-packages", args.torch, *PYTHON_PACKAGES)
        except SystemExit as error:
            print(f"{not_checked} a download has failed: {error}")
            return
        install(root / "site-packages", args.wheel.resolve())
        python = python_command(root, stand_in_for_cuda(root, root / "site-packages"))
        programs = {
            cpu: [*python, *(args.program or info_of(cpu))] for cpu in args.cpu or PROCESSORS
        }
        found = failures(programs, root, {} if args.program else PROCESSORS)
    if found:
        sys.exit("\n".join(f"emulated: {sentence}" for sentence in found))


if __name__ == "__main__":
    main()
