"""Runs the wheel for aarch64 on an x86-64 machine, by QEMU's emulation of single programs.

    python -m tools.wheels.emulated dist/fusedseq-...-aarch64.whl [--cpu NAME ...] [PROGRAM ...]

It makes a directory with the wheel, a Python and the C libraries of Debian for arm64, and torch for
aarch64, and runs `python -m fusedseq info` there for every --cpu, or PROGRAM (the arguments of that
Python). It needs Debian's apt-get and its packages qemu-user-static and
g++-aarch64-linux-gnu; nothing is installed on this system.

Recent wheels of torch for aarch64 are CUDA builds. Of the CUDA libraries that they are linked with,
gigabytes, nothing is called without a GPU: a stand-in defines their symbols as functions that
return 100, cudaErrorNoDevice.
"""

import argparse
import platform
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from importlib.metadata import version
from pathlib import Path

from tools.wheels.__main__ import run
from tools.wheels.symbols import readelf, uses

TOOLS = ("qemu-aarch64-static", "aarch64-linux-gnu-gcc", "apt-get", "dpkg-deb")
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
    """Installs torch, what it imports, and the wheel into a directory; runs nothing of them."""
    options = [
        *("install", "-q", "--no-deps", "--no-compile", "--only-binary=:all:", "--upgrade"),
        *("--disable-pip-version-check", "--implementation=cp", f"--python-version={VERSION}"),
        *(f"--platform={name}_aarch64" for name in PLATFORMS),
        *("--target", site),
    ]
    run(sys.executable, "-m", "pip", *options, torch, *PYTHON_PACKAGES, wheel)


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
    built_with = f"torch=={version('torch').partition('+')[0]}"
    parser.add_argument("--torch", default=built_with, help="by default %(default)s")
    parser.add_argument("--root", type=Path, help="where to make it, and to leave it")
    parser.add_argument("program", nargs="*", help="by default -m fusedseq info")
    args = parser.parse_args()
    if platform.machine() != "x86_64" or (reason := missing()):
        print(f"NOT CHECKED: the wheel for aarch64 under emulation, since {reason}")
        return
    with tempfile.TemporaryDirectory() as temporary:
        root = (args.root or Path(temporary)).resolve()
        try:
            python = make(args.wheel.resolve(), args.torch, root)
        except SystemExit as error:  # of a download, mostly
            print(f"NOT CHECKED: the wheel for aarch64 under emulation: {error}")
            return
        program = args.program or ["-m", "fusedseq", "info"]
        failed = run_on_each(args.cpu or PROCESSORS, [*python, *program], root)
    if failed:
        sys.exit(f"emulated: failed on {', '.join(failed)}")


def run_on_each(processors: Iterable[str], command: list[str], root: Path) -> list[str]:
    """Runs a command on all emulated processors at once; returns those on which it failed.

    Prints the output of each.
    """
    processes = {
        cpu: subprocess.Popen(
            ["qemu-aarch64-static", "-cpu", cpu, *command],
            cwd=root,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for cpu in processors
    }
    failed = []
    for cpu, process in processes.items():
        output, _ = process.communicate()
        print(f"\nemulated processor: {cpu}\n{output}", flush=True)
        if process.returncode:
            failed.append(cpu)
    return failed


if __name__ == "__main__":
    main()
