"""Runs the wheel for aarch64 on an x86-64 machine, by QEMU's emulation of single programs.

    python -m tools.wheels.emulated dist/fusedseq-...-aarch64.whl [--cpu NAME ...] [PROGRAM ...]

It makes a directory with the wheel, a Python and the C libraries of Debian for arm64, and torch for
aarch64, and runs `python -m fusedseq info` there for every --cpu, or PROGRAM (the arguments of that
Python). It needs the packages qemu-user-static, binutils-aarch64-linux-gnu and
gcc-aarch64-linux-gnu of Debian, pip and apt-get; nothing is installed on this system.

Recent wheels of torch for aarch64 are CUDA builds. Of the CUDA libraries that they are linked with,
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
from pathlib import Path

from tools.wheels.__main__ import run

TOOLS = ("qemu-aarch64-static", "aarch64-linux-gnu-gcc", "aarch64-linux-gnu-readelf", "apt-get")
# With and without the instruction bfdot, whose kernels are baseline_bf16.
PROCESSORS = ("max", "cortex-a57")
VERSION = "{}.{}".format(*sys.version_info)
DEBIAN = (
    *(f"python{VERSION}-minimal", f"libpython{VERSION}-minimal", f"libpython{VERSION}-stdlib"),
    *("libc6", "libgcc-s1", "libstdc++6", "libgomp1", "zlib1g", "libexpat1", "libffi8"),
    *("libssl3", "libbz2-1.0", "liblzma5", "libuuid1", "libsqlite3-0", "libtinfo6"),
)
# What torch and this package import. Their versions follow from torch's own requirements.
PYTHON_PACKAGES = (
    *("typing_extensions", "sympy", "mpmath", "networkx", "jinja2", "markupsafe", "filelock"),
    *("fsspec", "numpy"),
)
PLATFORMS = ("manylinux_2_28", "manylinux_2_27", "manylinux2014", "manylinux_2_17")


def missing() -> str | None:
    """Returns what this machine lacks for an emulation, in words; None if it has everything."""
    tools = [tool for tool in TOOLS if not shutil.which(tool)]
    return f"this machine has no {', '.join(tools)}" if tools else None


def unpack_debian(root: Path) -> None:
    """Unpacks Debian's packages for arm64, with lists and a cache of apt-get's own in `root`."""
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


def install_packages(wheel: Path, torch: str, site: Path) -> None:
    """Installs torch, what it imports, and the wheel into a directory, without running any of it."""
    options = [
        *("install", "-q", "--no-deps", "--no-compile", "--only-binary=:all:", "--upgrade"),
        *("--disable-pip-version-check", "--implementation=cp", f"--python-version={VERSION}"),
        *(f"--platform={name}_aarch64" for name in PLATFORMS),
        *("--target", site),
    ]
    run(sys.executable, "-m", "pip", *options, torch, *PYTHON_PACKAGES, wheel)


def needed_libraries(library: Path) -> list[str]:
    """The names of the libraries that a library is linked with."""
    return re.findall(r"\(NEEDED\).*\[(.+)\]", run("aarch64-linux-gnu-readelf", "-dW", library))


def symbols(library: Path) -> tuple[set[str], set[str]]:
    """The names that a library defines, and those that it must have from others."""
    defined, undefined = set(), set()
    table = run("aarch64-linux-gnu-readelf", "--dyn-syms", "-W", library)
    for line in table.splitlines():
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
    absent = {n for library in libraries for n in needed_libraries(library)} - present
    if not absent:
        return None
    defined, undefined = set(), set()
    program = root / f"usr/bin/python{VERSION}"  # defines Python's own interface
    others = [*root.glob("lib/aarch64-linux-gnu/*.so*"), *root.glob("usr/lib/*-gnu/*.so*"), program]
    for library in [*libraries, *others]:
        of_library = symbols(library)
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


def make(wheel: Path, torch: str, root: Path) -> list[str]:
    """Makes everything in `root`; returns the command that starts the emulated Python, without the
    emulator's choice of a processor."""
    site = root / "site-packages"
    unpack_debian(root)
    install_packages(wheel, torch, site)
    preloaded = stand_in_for_cuda(root, site)
    variables = {
        "PYTHONHOME": root / "usr",
        "PYTHONPATH": site,
        "PYTHONDONTWRITEBYTECODE": "1",
        "LD_LIBRARY_PATH": root / "stand-ins",
        **({"LD_PRELOAD": preloaded} if preloaded else {}),
    }
    given = [part for name, value in variables.items() for part in ("-E", f"{name}={value}")]
    return ["-L", str(root), *given, str(root / f"usr/bin/python{VERSION}")]


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m tools.wheels.emulated",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("wheel", type=Path)
    parser.add_argument("--cpu", action="append", help="QEMU's names; by default max, cortex-a57")
    parser.add_argument("--torch", default="torch==2.11.0", help="by default %(default)s")
    parser.add_argument("--root", type=Path, help="where to make it, and to leave it")
    parser.add_argument("program", nargs="*", help="by default -m fusedseq info")
    args = parser.parse_args()
    if platform.machine() != "x86_64" or (reason := missing()):
        print(f"NOT CHECKED: the wheel for aarch64 under emulation, since {reason}")
        return
    failed = []
    with tempfile.TemporaryDirectory() as temporary:
        root = (args.root or Path(temporary)).resolve()
        python = make(args.wheel.resolve(), args.torch, root)
        for cpu in args.cpu or PROCESSORS:
            print(f"\nemulated processor: {cpu}", flush=True)
            command = ["qemu-aarch64-static", "-cpu", cpu, *python]
            program = args.program or ["-m", "fusedseq", "info"]
            if subprocess.run([*command, *program], cwd=root, env=os.environ).returncode:
                failed.append(cpu)
    if failed:
        sys.exit(f"emulated: failed on {', '.join(failed)}")


if __name__ == "__main__":
    main()
