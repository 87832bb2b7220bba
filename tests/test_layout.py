"""DESIGN.md, executable: one name and one signature per operator, imports that point one way, CUDA without torch."""

import ast
import inspect
import re
from pathlib import Path

import pytest
from fusedseq import fused, reference
from fusedseq.testing import CASES

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "pyext/fusedseq"
OPERATORS = reference.__all__
# What each part of the package may import of it, besides itself.
ARROWS = {
    "reference": set(),
    "_load": set(),
    "machine": {"_load", "__version__"},
    "kernels": set(),
    "fused": {"reference", "kernels", "_load", "_C"},
    "nn": {"fused", "reference"},
    "models": {"nn", "fused", "reference"},
    "decoding": {"models"},
    "data": set(),
    "optim": {"_load"},
    "tasks": {"decoding", "models", "optim", "nn", "data", "fused", "reference", "machine"},
    "testing": {"fused", "reference"},
    "cli": {"tasks", "info", "bench_cli", "data"},
}


def imported(path):
    """The parts of fusedseq that a file imports, also inside functions."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: imports are written in full"
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        else:
            continue
        found |= {name.split(".")[1] for name in names if name.startswith("fusedseq.")}
    return found


def files(part):
    folder = PACKAGE / part
    return [folder.with_suffix(".py")] if folder.with_suffix(".py").is_file() else sorted(folder.rglob("*.py"))


@pytest.mark.parametrize("part", ARROWS)
def test_imports_point_one_way(part):
    assert files(part) or part in ("models", "tasks"), f"no file of fusedseq.{part}"
    for path in files(part):
        wrong = imported(path) - ARROWS[part] - {part}
        assert not wrong, f"{path.relative_to(ROOT)} imports fusedseq.{sorted(wrong)}, {part} may not"


def test_the_oracles_import_torch_alone():
    for path in files("reference"):
        tree = ast.parse(path.read_text())
        modules = {a.name.split(".")[0] for n in ast.walk(tree) if isinstance(n, ast.Import) for a in n.names}
        modules |= {n.module.split(".")[0] for n in ast.walk(tree) if isinstance(n, ast.ImportFrom)}
        assert modules <= {"torch", "fusedseq", "math"}, path.name


def test_fused_and_reference_have_the_same_operators():
    assert {*fused.__all__} - {"explain"} == {*OPERATORS}
    assert [*reference.__all__] == sorted(reference.__all__)


@pytest.mark.parametrize("op", OPERATORS)
def test_an_operator_has_one_name_and_one_signature(op):
    ours, oracle = getattr(fused, op), getattr(reference, op)
    assert inspect.signature(ours) == inspect.signature(oracle)
    for function, package in ((ours, "fused"), (oracle, "reference")):
        assert function.__module__ == f"fusedseq.{package}.{op}"
        assert (PACKAGE / package / f"{op}.py").is_file()
        assert function.__doc__, f"{package}.{op} has no docstring"


@pytest.mark.parametrize("op", OPERATORS)
def test_an_operator_has_cases(op):
    assert [case for case in CASES if case.op == op]


def test_every_case_is_of_an_operator_and_has_an_id_of_its_own():
    assert {case.op for case in CASES} == {*OPERATORS}
    ids = [str(case) for case in CASES]
    assert not {i for i in ids if ids.count(i) > 1}


def test_cuda_sources_and_what_they_include_see_no_torch():
    """nvcc takes 2 s for a file without torch's headers, and 70 s with them."""
    sources = [p for p in ROOT.glob("csrc/**/*") if p.suffix in (".cu", ".cuh")]
    torch_free = [*sources, *ROOT.glob("csrc/cells/*.h"), *ROOT.glob("csrc/cpu/*"), ROOT / "csrc/_C.cpp",
                  ROOT / "csrc/philox.h", ROOT / "csrc/host_device.h"]  # fmt: skip
    seen = set()
    while torch_free:
        path = torch_free.pop().resolve()
        if path in seen:
            continue
        seen.add(path)
        for name in re.findall(r'^\s*#\s*include\s*[<"]([^>"]+)[>"]', path.read_text(), re.M):
            assert not re.match(r"(torch|ATen|c10)\b", name), f"{path.relative_to(ROOT)} includes {name}"
            torch_free += [p for p in (path.parent / name, ROOT / "csrc" / name) if p.is_file()][
                :1
            ]  # as the compiler does
    assert ROOT / "csrc/cpu/kernels.cpp" in seen


def test_operators_use_the_stable_abi_alone():
    """A header of ATen or c10 would tie the library to one version of torch."""
    for path in [*ROOT.glob("csrc/*.cpp"), *ROOT.glob("csrc/*.h")]:
        if path.name in (
            "_autograd.cpp",
            "autograd_formulas.h",
        ):  # a module of its own, which they do without under another torch
            continue
        for name in re.findall(r"#\s*include\s*<((?:torch|ATen|c10)[^>]*)>", path.read_text()):
            assert name.startswith(("torch/csrc/stable/", "torch/headeronly/", "torch/csrc/inductor/aoti_torch/c/")), (
                f"{path.name} includes {name}"
            )


def test_no_device_decision_is_made_in_python():
    """The dispatcher is the only dispatcher."""
    for part in ("fused", "nn", "models"):
        for path in files(part):
            if path.name in ("explain.py", "check.py"):  # they say what the dispatcher will do, and what it can't
                continue
            if path.name == "lstm_cudnn.py":  # what no registered operator can be
                continue
            found = re.findall(r"\.is_cuda\b|device\.type\s*[=!]=", path.read_text())
            assert not found, f"{path.relative_to(ROOT)} has {found}"


def test_every_registered_operator_belongs_to_a_public_one():
    """`<op>`, `<op>_backward`, ...: the schemas' names are the functions' names."""
    schemas = []
    for path in ROOT.glob("csrc/*.cpp"):
        schemas += re.findall(r'm\.def\(\s*"(\w+)\(', path.read_text())
    assert schemas
    for schema in {*schemas} - {"gemm_rate"}:  # the roof of the benchmarks
        assert any(schema == op or schema.startswith(op + "_") for op in [*OPERATORS, "nt_asgd"]), schema
