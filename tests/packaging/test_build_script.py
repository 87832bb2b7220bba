"""csrc/build.py, which compiles the libraries: the CUDA toolkit that it finds, the architectures
and the number of jobs; and what the Makefile and CI say about a build.
"""

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture
def build_script():
    spec = importlib.util.spec_from_file_location("csrc_build", ROOT / "csrc/build.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def toolkit(tmp_path):
    for name in ("bin/nvcc", "include/cuda_runtime.h"):
        (tmp_path / "toolkit" / name).parent.mkdir(parents=True)
        (tmp_path / "toolkit" / name).touch()
    return tmp_path / "toolkit"


@pytest.fixture
def without_gpu(build_script, monkeypatch):
    """No GPU, no toolkit in the usual places, and none of the variables that name one."""
    for name in ("CUDA_HOME", "CUDA_PATH", "FUSEDSEQ_CUDA"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(build_script, "USUAL_TOOLKIT", "/nowhere")
    monkeypatch.setattr(build_script.shutil, "which", lambda name: None)
    monkeypatch.setattr(build_script, "has_gpu", lambda: False)


def torch_built_with(cuda, folder):
    """The directory of a torch whose version.py is written as torch's own build writes it."""
    folder.mkdir(exist_ok=True)
    (folder / "version.py").write_text(
        "from typing import Optional\n\n__all__ = ['__version__', 'debug', 'cuda']\n"
        f"__version__ = '2.13.0'\ncuda: Optional[str] = {cuda!r}\nhip: Optional[str] = None\n"
    )
    return folder


@pytest.mark.usefixtures("without_gpu")
def test_a_wrapper_script_is_not_taken_for_a_toolkit(build_script, toolkit, tmp_path, monkeypatch):
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin/nvcc").touch()
    monkeypatch.setattr(build_script.shutil, "which", lambda name: tmp_path / "bin" / name)
    torch = torch_built_with("12.8", tmp_path / "torch")
    assert build_script.cuda_toolkit(torch) is None
    monkeypatch.setenv("FUSEDSEQ_CUDA", "1")
    with pytest.raises(SystemExit, match="FUSEDSEQ_CUDA=1 needs a CUDA toolkit"):
        build_script.cuda_toolkit(torch)
    monkeypatch.setenv("CUDA_PATH", str(toolkit))
    assert build_script.cuda_toolkit(torch) == toolkit
    monkeypatch.setenv("FUSEDSEQ_CUDA", "0")
    assert build_script.cuda_toolkit(torch) is None
    monkeypatch.setenv("FUSEDSEQ_CUDA", "yes")
    with pytest.raises(SystemExit, match="must be 0, 1 or auto, got yes"):
        build_script.cuda_toolkit(torch)


@pytest.mark.usefixtures("without_gpu")
def test_cuda_is_compiled_where_it_can_run(build_script, toolkit, tmp_path, monkeypatch):
    """By default it takes a CUDA build of torch or a GPU, besides a toolkit."""
    monkeypatch.setenv("CUDA_HOME", str(toolkit))
    of_cpu, of_cuda = (torch_built_with(cuda, tmp_path / str(cuda)) for cuda in (None, "12.8"))
    for value in ("auto", ""):
        monkeypatch.setenv("FUSEDSEQ_CUDA", value)
        assert build_script.cuda_toolkit(of_cpu) is None
        assert build_script.cuda_toolkit(of_cuda) == toolkit
    monkeypatch.setattr(build_script, "has_gpu", lambda: True)
    assert build_script.cuda_toolkit(of_cpu) == toolkit
    monkeypatch.setattr(build_script, "has_gpu", lambda: False)
    monkeypatch.setenv("FUSEDSEQ_CUDA", "1")
    assert build_script.cuda_toolkit(of_cpu) == toolkit


@pytest.mark.usefixtures("without_gpu")
def test_a_build_without_cuda_says_why(build_script, tmp_path, monkeypatch):
    of_cpu, of_cuda = (torch_built_with(cuda, tmp_path / str(cuda)) for cuda in (None, "12.8"))
    monkeypatch.setenv("FUSEDSEQ_CUDA", "auto")
    assert "FUSEDSEQ_CUDA=1 compiles" in build_script.why_without_cuda(of_cpu)
    assert "there is no CUDA toolkit" in build_script.why_without_cuda(of_cuda)
    monkeypatch.setenv("FUSEDSEQ_CUDA", "0")
    assert build_script.why_without_cuda(of_cuda) == "FUSEDSEQ_CUDA is 0"


def test_the_cuda_of_this_torch_is_recognized(build_script):
    import torch

    assert build_script.is_cuda_build(Path(torch.__file__).parent) == bool(torch.version.cuda)


def test_ci_compiles_the_cuda_kernels():
    assert re.search(r"^export FUSEDSEQ_CUDA=1\b", (ROOT / ".ci/run").read_text(), re.M)


def test_the_number_of_jobs_is_a_number(build_script, monkeypatch):
    monkeypatch.setenv("MAX_JOBS", "3")
    assert build_script.job_count() == 3
    for wrong in ("many", "0"):
        monkeypatch.setenv("MAX_JOBS", wrong)
        with pytest.raises(SystemExit, match=f"MAX_JOBS must be a number from 1, got {wrong}"):
            build_script.job_count()


def test_make_builds_before_pip_which_hides_the_build():
    """The recipe prints a line per source: the libraries are built before pip installs them."""
    recipe = re.search(
        r"^define install\n(.*?)^endef", (ROOT / "Makefile").read_text(), re.M | re.S
    )
    commands = recipe[1].splitlines()
    (build,) = [i for i, line in enumerate(commands) if "setup.py -q build_ext --inplace" in line]
    (package,) = [i for i, line in enumerate(commands) if "-e '.[$(1)]'" in line]
    assert build < package


def test_a_build_prints_a_line_per_source(build_script, tmp_path, capfd, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "csrc").mkdir()
    (tmp_path / "csrc/rules.ninja").write_text(
        "rule copy\n  command = cp $in $out\n  description = $in\n"
    )
    for name in ("a", "b"):
        (tmp_path / f"{name}.cpp").touch()
    ninja = build_script.NinjaFile(tmp_path / "out", {})
    for name in ("a", "b"):
        ninja.edge("copy", f"{name}.o", [tmp_path / f"{name}.cpp"])
    monkeypatch.setenv("MAX_JOBS", "1")
    ninja.run()
    lines = capfd.readouterr().out.splitlines()
    assert lines[0] == "fusedseq: 2 steps, one after the other"
    assert {line.rpartition("/")[2] for line in lines[1:]} == {"a.cpp", "b.cpp"}
    assert lines[1].startswith("[1/2] ")


@pytest.mark.parametrize(
    ("listed", "codes"),
    [
        ("Hopper", ["arch=compute_90,code=sm_90", "arch=compute_90,code=compute_90"]),
        ("7.5, 8.6", ["arch=compute_86,code=sm_86"]),
        ("8.6", ["arch=compute_86,code=sm_86"]),
        (
            "8.0 9.0a+PTX",
            [
                "arch=compute_80,code=sm_80",
                "arch=compute_90a,code=sm_90a",
                "arch=compute_90a,code=compute_90a",
            ],
        ),
        ("12.0;", ["arch=compute_120,code=sm_120"]),
    ],
)
def test_torch_cuda_arch_list_is_read_as_torch_does(build_script, listed, codes):
    found = build_script.gencodes(build_script.architectures(listed))
    assert found == [f"-gencode={code}" for code in codes]


@pytest.mark.parametrize("listed", ["all", "90", "9.0;native", "7.5", "Turing"])
def test_architectures_that_are_no_numbers_or_too_old_are_refused(build_script, listed):
    with pytest.raises(SystemExit, match="fusedseq: TORCH_CUDA_ARCH_LIST must hold "):
        build_script.architectures(listed)


def test_an_older_toolkit_compiles_for_the_default_gpus_that_it_knows(
    build_script, tmp_path, capsys
):
    nvcc = tmp_path / "nvcc"
    for known, expected in (
        ("sm_80 sm_90 sm_100 sm_120", ["8.0", "9.0a", "10.0+PTX", "12.0"]),
        ("sm_75 sm_80 sm_86 sm_89 sm_90", ["8.0", "9.0a", "9.0+PTX"]),
    ):
        nvcc.write_text(f"#!/bin/sh\nprintf '%s\\n' {known}\n")
        nvcc.chmod(0o755)
        assert build_script.default_architectures(nvcc) == expected
    assert "and not for 10.0+PTX, 12.0; CUDA 12.8 or later does" in capsys.readouterr().out


def test_a_path_with_a_blank_is_one_word_of_a_command(build_script):
    assert build_script.in_shell("/a b/$torch") == "'/a b/$$torch'"


def test_objects_that_use_torch_are_compiled_again_for_another_torch():
    rules = (ROOT / "csrc/rules.ninja").read_text()
    for rule in ("operator", "module", "torch_module"):
        command = re.search(rf"^rule {rule}\n  command = (.*?)\n  depfile", rules, re.M | re.S)[1]
        assert "$built_with" in command
        assert "$relative" in command
    assert "-DFUSEDSEQ_TORCH=$torch_version" in rules


def test_the_linker_runs_again_after_a_change_of_its_script(build_script, tmp_path):
    ninja = build_script.NinjaFile(tmp_path, {})
    build_script.add_libraries(ninja, "x86_64", [], cuda=False)
    links = [line for line in ninja._lines if re.match(r"build \S+\.so: link ", line)]
    assert len(links) == 3
    assert all(line.endswith(" | csrc/linux/local_symbols.map") for line in links)


def stamp(folder, **variables):
    """What tools/build_stamp.py prints in `folder` with more environment variables."""
    command = [sys.executable, str(ROOT / "tools/build_stamp.py")]
    environment = {**os.environ, **variables}
    return subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, check=True
    ).stdout


def test_the_stamp_of_a_build_depends_on_what_the_build_depends_on(tmp_path):
    found = {
        stamp(tmp_path, FUSEDSEQ_CUDA=cuda, CXX=cxx)
        for cuda in ("0", "1")
        for cxx in ("", "clang++")
    }
    assert len(found) == 4
    assert all(re.fullmatch(r"\.stamps/\d+\n", line) for line in found)
    assert stamp(tmp_path) == stamp(tmp_path)
