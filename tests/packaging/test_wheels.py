"""The distributions for a package index: what their libraries may depend on, and the functions that
stand in for those that manylinux_2_28 lacks. `make wheels`, which CI runs, builds them.
"""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tools.wheels import emulated, symbols

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "pyext/fusedseq"
LINUX = ROOT / "csrc/linux"


def compile_code(folder, code, *options, output="_ops.so"):
    (folder / "code.cpp").write_text(code)
    command = ["g++", "-O1", *options, folder / "code.cpp", "-o", folder / output]
    subprocess.run(command, check=True)
    return folder / output


def problems(library):
    return list(symbols.problems(library.name.partition(".")[0], symbols.uses(library)))


def limits(**versions):
    return symbols.ALLOWED | {"versions": symbols.ALLOWED["versions"] | versions}


def test_libraries_of_this_build_use_what_is_allowed():
    libraries = sorted(PACKAGE.glob("*.so"))
    names = [library.name.partition(".")[0] for library in libraries]
    assert {"_ops", "_C", "_autograd"} <= set(names)
    for library in libraries:
        assert symbols.uses(library).symbols
        assert problems(library) == []


@pytest.mark.parametrize(
    ("library", "code", "symbol"),
    [
        ("_ops", 'extern "C" int PyErr_Clear(); auto f = PyErr_Clear;', "PyErr_Clear"),
        ("_ops", 'extern "C" int aoti_torch_new(); auto f = aoti_torch_new;', "aoti_torch_new"),
        ("_C", 'extern "C" int torch_list_size(); auto f = torch_list_size;', "torch_list_size"),
        # Of the standard library without a version: found in one of torch's libraries.
        ("_autograd", "namespace std { void other(); } auto f = std::other;", "_ZSt5otherv"),
    ],
)
def test_a_symbol_that_is_not_listed_is_named(tmp_path, library, code, symbol):
    library = compile_code(tmp_path, code, "-shared", "-fPIC", output=f"{library}.so")
    (found,) = problems(library)
    assert found == f"{library.stem}: uses {symbol}, which allowed.toml does not list"


def test_a_symbol_of_a_newer_system_is_named(tmp_path):
    code = "#include <cstdlib>\nvoid* f() { return aligned_alloc(64, 64); }"  # glibc 2.16 or 2.17
    used = symbols.uses(compile_code(tmp_path, code, "-shared", "-fPIC"))
    assert list(symbols.problems("_ops", used)) == []
    (found,) = symbols.problems("_ops", used, limits(GLIBC="2.10"))
    assert re.fullmatch(r"_ops: uses aligned_alloc of GLIBC_2\.1\d, newer than GLIBC_2\.10", found)


def test_a_library_that_is_not_listed_is_named(tmp_path):
    (tmp_path / "other.cpp").write_text("int other() { return 1; }")
    other = [tmp_path / "other.cpp", "-o", tmp_path / "libother.so"]
    subprocess.run(["g++", "-shared", "-fPIC", *other], check=True)
    found = problems(
        compile_code(tmp_path, "", "-shared", "-Wl,--no-as-needed", f"-L{tmp_path}", "-lother")
    )
    assert found == ["_ops: needs the library libother.so"]
    assert problems((tmp_path / "libother.so").rename(tmp_path / "_new.so")) == [
        "_new: allowed.toml has no table for this library"
    ]


def test_a_library_that_does_not_name_torch_is_refused(tmp_path):
    code = 'extern "C" int aoti_torch_abi_version(); auto f = aoti_torch_abi_version;'
    assert problems(compile_code(tmp_path, code, "-shared", "-fPIC")) == [
        "_ops: does not name libtorch_cpu.so, whose symbols it uses"
    ]


def test_the_command_fails_with_the_name_of_the_symbol(tmp_path):
    code = 'extern "C" int aoti_torch_newer(); int f() { return aoti_torch_newer(); }'
    library = compile_code(tmp_path, code, "-shared", "-fPIC")
    command = [sys.executable, "-m", "tools.wheels.symbols", library]
    process = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert process.returncode == 1
    assert "_ops: uses aoti_torch_newer, which allowed.toml does not list" in process.stderr
    assert process.stdout.startswith("_ops.so: ")


# Returns 0, or the number of the first thing that is wrong.
PROGRAM = r"""
#include <cmath>
#include <dlfcn.h>
#include <exception>
#include <memory>
#include <new>
#include <sstream>
#include <string>
#include <vector>

int alive = 0;
struct Thrown {
  Thrown() { ++alive; }
  Thrown(const Thrown&) { ++alive; }
  ~Thrown() { --alive; }
};

extern "C" int wrong(int count) {
  {
    std::exception_ptr first;
    try { throw Thrown(); } catch (...) { first = std::current_exception(); }
    std::exception_ptr second = first, third = second;
    first = nullptr;
    second = third;
    if (alive != 1) return 1;
    try { std::rethrow_exception(third); } catch (const Thrown&) {}
    if (alive != 1 || first || !second) return 2;
  }
  if (alive) return 3;

  std::stringstream both;
  std::ostringstream out;
  int number = 0;
  both << 41 << ' ';
  both >> number;
  out << number << std::string(100, 'x');
  if (number != 41 || both.str() != "41 " || out.str() != "41" + std::string(100, 'x')) return 4;

  try {
    std::vector<int>* v = new std::vector<int>[size_t(-1) / (count * 8)];
    delete[] v;
    return 5;
  } catch (const std::bad_alloc&) {}

  const double x = count * 1.5;
  if (std::abs(std::log(std::exp(x)) - x) > 1e-15 || std::pow(x, 2.) != x * x) return 6;
  if (!dlsym(RTLD_DEFAULT, "strlen")) return 7;
  const auto shared = std::make_shared<int>(3), other = shared;
  if (shared.use_count() != 2) return 8;
  return 0;
}
"""


@pytest.mark.parametrize("standard", ["c++17", "c++20"])
def test_stand_ins_for_newer_symbols_do_what_the_system_does(tmp_path, standard):
    sources = [str(LINUX / f"{name}_symbols.cpp") for name in ("c", "cxx")]
    objects = [tmp_path / f"{Path(source).stem}.o" for source in sources]
    for source, target in zip(sources, objects, strict=True):
        options = ["-O2", "-std=c++17", "-fPIC", "-fvisibility=hidden", f"-I{ROOT / 'csrc'}"]
        subprocess.run(["g++", *options, "-c", source, "-o", target], check=True)
    # Without optimization, so that nothing is inlined and every function is called.
    options = "-O0", f"-std={standard}", "-shared", "-fPIC", *map(str, objects)
    script = f"-Wl,--version-script={LINUX / 'local_symbols.map'}"
    library = compile_code(tmp_path, PROGRAM, *options, script)
    # In a process that has no libstdc++ yet, and then in one that has torch's libraries.
    for first in ("", "import torch; "):
        code = f"{first}import ctypes; print(ctypes.CDLL({str(library)!r}).wrong(1))"
        process = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
        assert process.stdout == "0\n", process
    used = symbols.uses(library)
    assert (
        "exp",
        "GLIBC_2.2.5" if os.uname().machine == "x86_64" else "GLIBC_2.17",
    ) in used.symbols
    assert list(symbols.problems("_ops", used)) == []


def test_every_function_that_is_bound_to_its_oldest_version_exists(tmp_path):
    sources = [str(path) for path in sorted(LINUX.glob("*.cpp"))]
    program = compile_code(
        tmp_path, "int main() {}", f"-I{ROOT / 'csrc'}", *sources, output="program"
    )
    if os.uname().machine == "x86_64":
        assert ("dlmopen", "GLIBC_2.3.4") in symbols.uses(program).symbols
    subprocess.run([program], check=True, env=os.environ | {"LD_BIND_NOW": "1"})


def test_the_emulator_that_is_missing_is_named(tmp_path):
    command = [sys.executable, "-m", "tools.wheels.emulated", tmp_path / "a.whl"]
    process = subprocess.run(
        command, cwd=ROOT, env=os.environ | {"PATH": ""}, capture_output=True, text=True
    )
    assert process.returncode == 0, process.stderr
    assert process.stdout.startswith("NOT CHECKED: the wheel for aarch64 under emulation, since")


def test_other_kernels_than_the_processor_should_use_are_a_failure(tmp_path, monkeypatch):
    emulator = tmp_path / "qemu-aarch64-static"
    emulator.write_text('#!/bin/sh\necho "CPU kernels used           baseline, found"\nexit $3\n')
    emulator.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    programs = {"old": ["0"], "new": ["0"], "broken": ["3"]}
    assert emulated.failures(programs, tmp_path, {"old": "baseline", "new": "baseline_bf16"}) == [
        "the kernels used on new must be baseline_bf16",
        "the program on broken has failed with code 3",
    ]


def test_defined_and_undefined_symbols_are_told_apart(tmp_path):
    code = """extern "C" {
    int other(); int absent() __attribute__((weak));
    int own() { return other() + (absent ? absent() : 0); }
    }"""
    defined, undefined = emulated.defined_and_undefined(
        compile_code(tmp_path, code, "-shared", "-fPIC")
    )
    assert "own" in defined
    assert "other" in undefined
    assert not {"absent", "own"} & undefined


@pytest.mark.parametrize("folder", [sys.prefix, sys.base_prefix])
def test_a_library_that_names_a_folder_of_the_environment_is_refused(folder, tmp_path):
    library = tmp_path / "_ops.so"
    library.write_bytes(b"\0torch/include/x.h\0")
    assert symbols.folders_in(library) == []
    library.write_bytes(b"\0" + folder.encode() + b"/torch/include/x.h\0")
    assert any(f"names the folder {folder} " in line for line in symbols.folders_in(library))
