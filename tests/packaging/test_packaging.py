"""Building and installing: sdist, wheel, editable install, CUDA, and other versions of torch.

The sources are copied and built in temporary folders, with the objects that this tree's own build
has compiled already. Installations are tested by `fusedseq info`, which compares every operator
with its oracle. Errors of a build or an import must be one line.
"""

import json
import os
import platform
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

from tests.operators.test_compile import COMPILED

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "pyext/fusedseq"
INFO = (
    "import runpy, sys; sys.argv = ['fusedseq', 'info']; "
    "runpy.run_module('fusedseq', run_name='__main__')"
)
# Interpreters of environments with other versions of torch or Python, separated as in PATH. .ci/run
# makes these environments.
OTHERS = [
    python for python in os.environ.get("FUSEDSEQ_OTHER_PYTHONS", "").split(os.pathsep) if python
]


def run(*command, cwd=None, **variables):
    """Runs a command without this environment's PYTHONPATH, and without the variables of this test
    run: pytest-benchmark refuses to work where it sees those of pytest-xdist. process.text is
    stdout and stderr.
    """
    env = {k: v for k, v in os.environ.items() if k != "PYTHONPATH" and "PYTEST" not in k}
    env |= {k: str(v) for k, v in variables.items()}
    process = subprocess.run(
        [*map(str, command)],
        cwd=cwd,
        env=env,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    process.text = process.stdout.strip()
    return process


def succeed(*command, **options):
    process = run(*command, **options)
    assert process.returncode == 0, process.text
    return process.text


def pip(command, *options):
    return succeed(sys.executable, "-m", "pip", command, "-q", *options)


def copy_objects(to):
    """Copies the objects of this tree's own build, with their times: a build of the copied sources
    then compiles only those that have changed since, and ends with an error if one is missing.
    """
    if (ROOT / "build").is_dir():
        for folder in (ROOT / "build").glob("*-*"):
            shutil.copytree(folder, to / "build" / folder.name)


def copy_sources(to):
    """Copies what a build needs from this tree, symbolic links as links."""
    to.mkdir(exist_ok=True)
    shutil.copytree(ROOT / "csrc", to / "csrc")
    shutil.copytree(ROOT / "kernels", to / "kernels", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copytree(
        ROOT / "pyext",
        to / "pyext",
        symlinks=True,
        ignore=shutil.ignore_patterns("__pycache__", "*.so", "*.egg-info", "build_info.json"),
    )
    for path in (
        *ROOT.glob("*.md"),
        *map(ROOT.joinpath, ("setup.py", "pyproject.toml", "MANIFEST.in", "Makefile")),
    ):
        shutil.copy2(path, to)
    (to / "tests").mkdir()
    return to


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """The wheel built from the sdist, which is built from a copy of the sources."""
    tree = copy_sources(tmp_path_factory.mktemp("sources"))
    succeed(sys.executable, "setup.py", "-q", "sdist", cwd=tree)
    (sdist,) = (tree / "dist").glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        assert "kernels/__init__.py" in "\n".join(m.name for m in archive if m.isfile())
        archive.extractall(tree / "unpacked", filter="data")
    (unpacked,) = (tree / "unpacked").iterdir()
    copy_objects(unpacked)
    offline = "--no-build-isolation", "--no-deps", "--no-index"
    pip("wheel", *offline, "-w", tree / "wheels", unpacked)
    (wheel,) = (tree / "wheels").iterdir()
    return wheel


@pytest.fixture(scope="module")
def tree(tmp_path_factory):
    """A copy of the sources, built in place."""
    tree = copy_sources(tmp_path_factory.mktemp("tree"))
    copy_objects(tree)
    succeed(sys.executable, "setup.py", "-q", "build_ext", "--inplace", cwd=tree)
    return tree


def unpacked(wheel, folder):
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder)
    return folder


def test_wheel_is_for_any_python_and_holds_the_kernels(wheel):
    assert re.fullmatch(r"fusedseq-[\d.]+-py3-none-linux_\w+\.whl", wheel.name)
    names = set(zipfile.ZipFile(wheel).namelist())
    kernels = {f"fusedseq/{path.relative_to(ROOT)}" for path in (ROOT / "kernels").rglob("*.py")}
    assert "fusedseq/kernels/attention/__init__.py" in kernels
    assert (
        kernels | {"fusedseq/_ops.so", "fusedseq/build_info.json", "fusedseq/fused/__init__.py"}
        <= names
    )
    modules = {str(path.relative_to(PACKAGE.parent)) for path in PACKAGE.rglob("*.py")}
    assert modules <= names
    assert {"fusedseq/py.typed", "fusedseq/tasks/experiments/results.json"} <= names
    for module in ("_C", "_autograd"):
        assert any(name.startswith(f"fusedseq/{module}.") for name in names)


def test_wheel_computes_under_this_torch(wheel, tmp_path):
    site = unpacked(wheel, tmp_path / "site")
    assert "nothing wrong" in succeed(sys.executable, "-c", INFO, cwd=tmp_path, PYTHONPATH=site)


def test_list_of_the_wheel_shows_our_results(wheel, tmp_path):
    site = unpacked(wheel, tmp_path / "site")
    command = sys.executable, "-m", "fusedseq", "list", "--json"
    listed = json.loads(succeed(*command, cwd=tmp_path, PYTHONPATH=site))
    carried = json.loads((PACKAGE / "tasks/experiments/results.json").read_text())
    assert sum(len(experiment["results"]) for experiment in listed) == len(carried) > 0


def test_benchmarks_of_the_clone_run_with_the_installed_wheel(wheel, tmp_path):
    """In the root of a clone whose own operators are not built."""
    site, clone = unpacked(wheel, tmp_path / "site"), copy_sources(tmp_path / "clone")
    shutil.copytree(ROOT / "bench", clone / "bench", ignore=shutil.ignore_patterns("results"))
    options = "--seconds", "0.01", "--compile-seconds", "0"
    command = sys.executable, "-m", "fusedseq", "bench", "weight_drop", *options
    text = succeed(*command, cwd=clone, PYTHONPATH=site)
    assert f"of the package in {site / 'fusedseq'}" in text
    assert len([*clone.glob("build/bench/*-weight_drop.json")]) == 1
    assert not (clone / "bench/results").exists()


def test_pytest_in_a_clone_that_is_not_built_says_what_to_do(tmp_path):
    clone = copy_sources(tmp_path / "clone")
    shutil.copy2(ROOT / "tests/conftest.py", clone / "tests")
    text = run(sys.executable, "-m", "pytest", "-q", "tests", cwd=clone).text
    assert f"pip install -v --no-build-isolation -e '{clone}[test]'" in text


def test_pip_installs_the_wheel_with_its_command(wheel, tmp_path):
    pip("install", "--no-deps", "--no-index", "--target", tmp_path, wheel)
    command = sys.executable, tmp_path / "bin/fusedseq", "--help"
    assert "info" in succeed(*command, PYTHONPATH=tmp_path)


@pytest.mark.skipif(
    not OTHERS,
    reason="FUSEDSEQ_OTHER_PYTHONS names no environment with another torch; .ci/run makes them",
)
@pytest.mark.parametrize("python", OTHERS)
def test_wheel_computes_under_another_torch(wheel, tmp_path, python):
    site = unpacked(wheel, tmp_path / "site")
    versions = "import platform, torch; print(torch.__version__, platform.python_version())"
    other, here = (succeed(p, "-c", versions).splitlines()[-1] for p in (python, sys.executable))
    assert other != here, f"{python} has this environment's own torch and Python, {here}"
    text = succeed(python, "-c", INFO, cwd=tmp_path, PYTHONPATH=site)
    assert "nothing wrong" in text
    assert f"torch {other.split()[0]}," in " ".join(text.split())


COMPILE = """
import sys

import torch
from fusedseq import fused
from fusedseq.testing import CASES, run

for case in [case for case in CASES if str(case) in sys.argv]:
    torch.compiler.reset()
    function = getattr(fused, case.op)
    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
    expected, got = (run(f, *case.inputs()) for f in (function, compiled))
    assert all(map(torch.equal, expected[0] + expected[1], got[0] + got[1])), case
    print("compiled", case)
"""


@pytest.mark.skipif(
    not OTHERS,
    reason="FUSEDSEQ_OTHER_PYTHONS names no environment with another torch; .ci/run makes them",
)
@pytest.mark.parametrize("python", OTHERS)
def test_operators_in_compiled_code_under_another_torch(wheel, tmp_path, python):
    site = unpacked(wheel, tmp_path / "site")
    cases = {case.op: str(case) for case in COMPILED}.values()  # one of each operator
    text = succeed(python, "-c", COMPILE, *cases, cwd=tmp_path, PYTHONPATH=site)
    assert len(re.findall("^compiled ", text, re.MULTILINE)) == len(cases)


@pytest.mark.skipif(
    not OTHERS,
    reason="FUSEDSEQ_OTHER_PYTHONS names no environment with another torch; .ci/run makes them",
)
@pytest.mark.parametrize("python", OTHERS)
def test_operators_compile_with_the_headers_of_another_torch(python):
    torch = Path(succeed(python, "-c", "import torch; print(torch.__file__)").splitlines()[-1])
    flags = ["-O0", "-std=c++17", "-Icsrc", "-fsyntax-only", "-isystem", torch.parent / "include"]
    flags += ["-DTORCH_STABLE_ONLY", "-DTORCH_TARGET_VERSION=0x020b000000000000"]
    for source in sorted((ROOT / "csrc/ops").glob("*.cpp")):
        succeed("g++", *flags, source, cwd=ROOT)


def test_editable_install_computes(tree, tmp_path):
    offline = "--no-build-isolation", "--no-deps", "--no-index"
    pip("install", *offline, "--ignore-installed", "--prefix", tmp_path, "-e", tree)
    (site,) = tmp_path.glob("lib*/python*/site-packages")
    first_in_path = (
        f"import site; site.addsitedir({str(site)!r}); "
        "import sys; sys.path.insert(0, sys.path.pop()); "
    )
    assert "nothing wrong" in succeed(sys.executable, "-c", first_in_path + INFO, cwd=tmp_path)
    code = first_in_path + "import fusedseq.kernels; print(fusedseq.__file__)"
    assert Path(succeed(sys.executable, "-c", code, cwd=tmp_path)).is_relative_to(tree)


def test_instruction_sets_share_no_inline_function(tree):
    """The linker takes one definition of a weak symbol for all instruction sets.

    If that were the AVX-512 one, baseline code would crash on older machines. Of data (nm's types u
    and V), such as the tables of csrc/math/cells.h, one definition serves all.
    """
    isas = json.loads((tree / "pyext/fusedseq/build_info.json").read_text())["isas"]
    objects = [path for isa in isas for path in tree.glob(f"build/*/cpu/*.{isa}.o")]
    assert len(objects) >= len(isas)
    for path in objects:
        isa = path.name.split(".")[1]
        symbols = succeed("nm", "-C", "--defined-only", "--extern-only", path).splitlines()
        assert any(f"fusedseq::{isa}::" in line for line in symbols)
        functions = [s for s in symbols if s.split()[1] not in "uV"]
        foreign = [s for s in functions if f"fusedseq::{isa}::" not in s]
        assert not foreign, f"{path.name} defines {foreign}"


def test_libraries_depend_only_on_the_system_and_torch(tree):
    """The operators need no Python and no OpenMP, the module _C no torch, and none of them CUDA."""
    package = tree / "pyext/fusedseq"
    (module,), (recorder,) = package.glob("_C.*.so"), package.glob("_autograd.*.so")
    system = r"lib(c|m|dl|rt|pthread|gcc_s|stdc\+\+)\.so\.\d+|ld-linux.*"
    libraries = (
        (package / "_ops.so", r"|lib(torch_cpu|c10)\.so"),
        (module, ""),
        (recorder, r"|lib(torch_python|torch_cpu|c10)\.so"),
    )
    for library, more in libraries:
        needed = re.findall(r"\(NEEDED\).*\[(.*)\]", succeed("readelf", "-d", library))
        assert [name for name in needed if not re.fullmatch(system + more, name)] == []


KERNEL = """
__global__ void twice(float* x) { x[threadIdx.x] *= 2; }  // (32,)
extern "C" __attribute__((visibility("default"))) int fusedseq_probe() {
  float* x = nullptr;
  if (cudaMalloc(&x, 32 * sizeof(float)) != cudaSuccess) return 0;
  twice<<<1, 32>>>(x);
  return cudaDeviceSynchronize() == cudaSuccess ? 1 : -1;
}
"""
CALL = """
#ifdef FUSEDSEQ_CUDA
#include <cuda_runtime.h>
extern "C" __attribute__((visibility("default"))) int fusedseq_with_cuda() {
  return CUDART_VERSION;
}
#endif
"""


@pytest.mark.skipif(not shutil.which("nvcc"), reason="no nvcc on PATH")
def test_cuda_sources_are_compiled_without_a_gpu(tree, tmp_path):
    tree = shutil.copytree(tree, tmp_path / "tree", symlinks=True)
    (tree / "csrc/cuda/probe.cu").write_text(KERNEL)
    (tree / "csrc/ops/probe.cpp").write_text(CALL)
    build = sys.executable, "setup.py", "-q", "build_ext", "--inplace"
    succeed(*build, cwd=tree, FUSEDSEQ_CUDA=1, TORCH_CUDA_ARCH_LIST="")
    info = json.loads((tree / "pyext/fusedseq/build_info.json").read_text())
    assert info["cuda_codes"] == ["sm_80", "sm_90a", "sm_100", "compute_100", "sm_120"]
    compiled = re.findall(
        r"Compiling entry function '_Z5twicePf' for '(\w+)'", "\n".join(info["ptxas"]["probe.cu"])
    )
    assert {"sm_80", "sm_90a", "sm_100", "sm_120"} == set(compiled)
    code = """import ctypes; from fusedseq import _load; library = _load.operators()
assert library.fusedseq_with_cuda() > 0 and library.fusedseq_probe() >= 0; print("loaded")"""
    assert succeed(sys.executable, "-c", code, PYTHONPATH=tree / "pyext") == "loaded"


def test_every_module_of_the_package_is_in_the_repository():
    """None is left out by .gitignore."""
    modules = [str(p.relative_to(ROOT)) for p in (ROOT / "pyext/fusedseq").rglob("*.py")]
    found = run("git", "check-ignore", *modules, cwd=ROOT)
    if found.returncode == 128:
        pytest.skip("not a git checkout")
    assert found.text == ""


def fake_torch(folder, version):
    """The metadata of a torch of this version, whose import fails."""
    (folder / "torch").mkdir(parents=True)
    (folder / "torch/__init__.py").write_text("raise AssertionError('imported')")
    (folder / f"torch-{version}.dist-info").mkdir()
    (folder / f"torch-{version}.dist-info/METADATA").write_text(
        f"Metadata-Version: 2.1\nName: torch\nVersion: {version}\n"
    )
    return folder


@pytest.fixture(scope="module")
def bare(tmp_path_factory):
    """The interpreter of an environment without packages."""
    succeed(
        sys.executable, "-m", "venv", "--without-pip", folder := tmp_path_factory.mktemp("bare")
    )
    return folder / "bin/python"


@pytest.mark.parametrize("version", [None, "2.4.1", "2.10.0+cu128"])
def test_no_torch_or_an_old_one_is_one_line(bare, tmp_path, version):
    site = [fake_torch(tmp_path / "site", version)] if version else []
    got = f"got {version}" if version else "got none"
    build = run(bare, "setup.py", "--version", cwd=ROOT, PYTHONPATH=os.pathsep.join(map(str, site)))
    assert build.returncode == 1
    assert re.fullmatch(r"fusedseq: a build needs torch >= 2\.11 .*", build.text)
    assert got in build.text
    path = os.pathsep.join(map(str, [ROOT / "pyext", *site]))
    command = run(bare, "-m", "fusedseq", "info", PYTHONPATH=path)
    assert command.returncode == 1
    assert re.fullmatch(r"fusedseq: needs torch >= 2\.11, .*", command.text)
    assert got.replace("got", "found") in command.text
    imported = run(bare, "-c", "import fusedseq", PYTHONPATH=path)
    assert imported.text.splitlines()[-1] == f"ImportError: {command.text}"


@pytest.mark.parametrize("left", [None, "../../kernels"])
def test_a_missing_kernels_link_is_one_line(tmp_path, left):
    """An unpacked archive may lack the link; without symbolic links git makes it a text file."""
    tree = copy_sources(tmp_path)
    link = tree / "pyext/fusedseq/kernels"
    link.unlink()
    if left:
        link.write_text(left)
    build = run(sys.executable, "setup.py", "--version", cwd=tree)
    assert build.returncode == 1
    assert re.fullmatch(
        r"fusedseq: pyext/fusedseq/kernels must be a link to ../../kernels, .*", build.text
    )
    command = run(sys.executable, "-m", "fusedseq", "info", PYTHONPATH=tree / "pyext")
    assert command.returncode == 1
    assert re.fullmatch(r"fusedseq: .*kernels must be .*", command.text)
    assert run(sys.executable, "-c", "import fusedseq", PYTHONPATH=tree / "pyext").returncode == 1


def test_operators_that_do_not_load_are_one_line(tmp_path):
    tree = copy_sources(tmp_path)
    for content, expected in (
        (None, "_ops.so is missing"),
        (b"no library", "does not load under torch"),
    ):
        if content:
            (tree / "pyext/fusedseq/_ops.so").write_bytes(content)
        process = run(sys.executable, "-m", "fusedseq", "info", PYTHONPATH=tree / "pyext")
        assert process.returncode == 1
        assert expected in process.text
        assert "Traceback" not in process.text
        process = run(sys.executable, "-c", "from fusedseq import fused", PYTHONPATH=tree / "pyext")
        assert process.returncode == 1
        assert re.fullmatch(
            rf"ImportError: fusedseq: .*{expected}.*", process.text.splitlines()[-1]
        )


@pytest.mark.skipif(bool(shutil.which("nvidia-smi")), reason="this machine may have a GPU")
def test_make_gpu_without_a_gpu_is_one_line(tmp_path):
    process = run(
        "make", "--no-print-directory", "gpu", f"OUT={tmp_path / 'results'}", cwd=ROOT, MAKEFLAGS=""
    )
    assert process.returncode == 2
    assert process.text.splitlines()[0] == "make gpu: needs a GPU, and nvidia-smi finds none here"
    assert not (tmp_path / "results").exists()


def test_setup_stays_small():
    assert len((ROOT / "setup.py").read_text().splitlines()) <= 90


def test_build_info_describes_this_machine(tree):
    info = json.loads((tree / "pyext/fusedseq/build_info.json").read_text())
    assert info["machine"] == platform.machine()
    assert info["isas"] == {
        "x86_64": ["baseline", "avx2", "avx512", "avx512_bf16", "avx512_amx"],
        "aarch64": ["baseline", "baseline_bf16"],
    }.get(info["machine"], ["baseline"])
