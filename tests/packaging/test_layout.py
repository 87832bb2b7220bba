"""The architecture of docs/design.md as tests: one name and one signature per operator, imports
that point one way, one folder per layer, and CUDA code that does not depend on torch.
"""

import ast
import inspect
import re
import subprocess
from pathlib import Path

import pytest
import torch
from fusedseq import fused, reference
from fusedseq.fused import autograd, gradient
from fusedseq.fused.schema import Schema
from fusedseq.testing import CASES

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "pyext/fusedseq"
OPERATORS = reference.__all__
# {part of the package: the other parts that it may import}
ARROWS = {
    "reference": set(),
    "_load": set(),
    "machine": {"_load", "__version__"},
    "kernels": set(),
    "kernel_table": {"_load", "kernels"},
    "fused": {"reference", "kernels", "kernel_table", "first_use", "_load", "_C"},
    # Registered by `fused`; it calls the operators at their first use on a GPU.
    "first_use": {"fused", "testing", "reference", "kernels", "_load"},
    "tune_kernels": {"fused", "kernel_table", "kernels"},
    "nn": {"fused", "reference"},
    "models": {"nn", "fused", "reference"},
    "acceleration": {"integrations", "nn", "fused"},
    "quantization": {"models", "nn", "fused"},
    "decoding": {"models", "fused"},
    "data": set(),
    "optim": {"_load"},
    "integrations": {"fused", "nn", "reference"},
    "tasks": {
        "decoding",
        "models",
        "optim",
        "nn",
        "data",
        "fused",
        "reference",
        "machine",
        "__version__",
    },
    "testing": {"fused", "reference"},
    "cli": {"tasks", "info", "data", "_load", "__version__"},
}
# The folders of each directory; files stand in these and nowhere else.
FOLDERS = {
    "csrc": {"ops", "math", "cpu", "cuda", "linux", "python"},
    "csrc/cpu": {"arguments", "simd", "gemm", "recurrence", "attention", "pointwise", "losses"},
    "csrc/cuda": {"recurrence"},
    "kernels": {"attention", "linear_cross_entropy", "residual_layer_norm"},
    "tests": {
        "operators",
        "modules",
        "integrations",
        "tasks",
        "triton",
        "simt",
        "ptx",
        "memory_model",
        "packaging",
        "benchmarks",
        "support",
    },
    "bench": {"suite", "training", "peers", "gpu", "experiments", "results"},
    "tools": {"gpu", "wheels"},
}
# What stands beside the folders.
FILES = {
    "csrc": {"build.py", "rules.ninja"},
    "tests": {"__init__.py", "conftest.py"},
    "tools": {"__init__.py", "build_stamp.py"},
}
# Pages that are not in the repository, which no file may cite.
OUTSIDE = re.compile(
    r"\b(?:DESIGN|SPEC|SEMANTICS|STYLE|PEERS)\.md\b|\bshared/(?:research|seeds|data)\b|\bseeds/"
)


def tracked_files():
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True)
    if listed.returncode:
        pytest.skip("not a git checkout")
    return [ROOT / name for name in listed.stdout.splitlines() if (ROOT / name).is_file()]


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
    module = folder.with_suffix(".py")
    return [module] if module.is_file() else sorted(folder.rglob("*.py"))


@pytest.mark.parametrize("part", ARROWS)
def test_imports_point_one_way(part):
    assert files(part), f"no file of fusedseq.{part}"
    for path in files(part):
        wrong = imported(path) - ARROWS[part] - {part}
        assert not wrong, f"{path.relative_to(ROOT)} imports fusedseq.{sorted(wrong)}"


@pytest.mark.parametrize("folder", FOLDERS)
def test_every_folder_is_a_layer(folder):
    inside = [path.relative_to(ROOT / folder) for path in tracked_files() if _is_in(path, folder)]
    assert {path.parts[0] for path in inside if len(path.parts) > 1} == FOLDERS[folder]
    if folder in FILES:
        assert {path.name for path in inside if len(path.parts) == 1} == FILES[folder]


def _is_in(path, folder):
    return path.is_relative_to(ROOT / folder)


def test_no_file_cites_a_page_outside_the_repository():
    for path in tracked_files():
        if path.suffix not in (".png", ".svg", ".json") and path != Path(__file__):
            found = OUTSIDE.findall(path.read_text())
            assert not found, f"{path.relative_to(ROOT)} cites {found}"


def test_the_package_reads_nothing_of_the_repository_around_it():
    for path in PACKAGE.rglob("*.py"):
        found = re.findall(r"__file__\)\.(?:resolve\(\)\.)?parents\[[2-9]\]", path.read_text())
        assert not found, f"{path.relative_to(ROOT)} has {found}"


def test_the_oracles_import_torch_alone():
    allowed = {"torch", "fusedseq", "math", "typing", "collections"}
    for path in files("reference"):
        tree = ast.parse(path.read_text())
        nodes = list(ast.walk(tree))
        modules = {
            a.name.split(".")[0] for n in nodes if isinstance(n, ast.Import) for a in n.names
        }
        modules |= {n.module.split(".")[0] for n in nodes if isinstance(n, ast.ImportFrom)}
        assert modules <= allowed, path.name


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
        parameters = inspect.signature(function).parameters.values()
        assert all(p.annotation is not p.empty for p in parameters)


@pytest.mark.parametrize("op", OPERATORS)
def test_an_operator_reads_each_of_its_parameters(op):
    """Most operators list their parameters in a dict. If the dict lacks an input of the registered
    operator, the call is a KeyError; this test finds any other parameter that was forgotten.
    """
    names = ast.walk(ast.parse(inspect.getsource(getattr(fused, op))))
    read = {n.id for n in names if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Load)}
    assert {*inspect.signature(getattr(fused, op)).parameters} <= read


@pytest.mark.parametrize("path", files("fused"), ids=lambda path: path.name)
def test_torch_2_11_can_compile_what_operators_call(path):
    """It cannot trace locals() and torch.amp.is_autocast_available, which later versions can."""
    nodes = list(ast.walk(ast.parse(path.read_text())))
    names = {n.id for n in nodes if isinstance(n, ast.Name)}
    names |= {n.attr for n in nodes if isinstance(n, ast.Attribute)}
    assert names.isdisjoint({"locals", "is_autocast_available"})


@pytest.mark.parametrize("op", OPERATORS)
def test_an_operator_has_cases(op):
    assert [case for case in CASES if case.op == op]


def test_every_case_is_of_an_operator_and_has_an_id_of_its_own():
    assert {case.op for case in CASES} == {*OPERATORS}
    ids = [str(case) for case in CASES]
    assert not {i for i in ids if ids.count(i) > 1}


def public_inputs_of_varlen():
    return set(inspect.signature(fused.attention_varlen).parameters)


def public_inputs(op):
    """The names of a public function's arguments, and of the inputs that they become."""
    names = set(inspect.signature(getattr(fused, op)).parameters)
    if "rounds" in names:  # a low-rank weight is a pair of factors, two inputs
        names |= {"Q_factor", "R_factor"}
    if "window" in names:  # (left, right), two inputs; attention_varlen is the same operator
        names |= {"window_left", "window_right", *public_inputs_of_varlen()}
    if op == "bidirectional_lstm":  # x is the input of each direction
        names |= {"x_reverse"}
    if op.startswith("layer_norm"):  # the gammas and beta_c become one input
        names |= {"norm"}
    return names | {"needs"}


@pytest.mark.parametrize("op", sorted({*OPERATORS} & {*autograd._rules} - {"mogrifier_lstm_pair"}))
def test_an_argument_keeps_its_name_down_to_the_registered_operator(op):
    assert {*Schema(op).inputs} <= public_inputs(op)


def test_the_schemas_of_backward_operators_name_what_they_take():
    """Every argument of a backward is an input or output of its forward, the gradient of an output,
    or `needs`; every result is the gradient of an input."""
    assert gradient.backwards
    for name, backward in gradient.backwards.items():
        known = {*backward.forward.inputs, *backward.forward.outputs, "needs", "outputs"}
        assert {*backward.backward.inputs} <= known | {*backward.output_gradients}, name
        assert len(backward.gradients) == len(backward.backward.outputs), name


def test_an_option_of_a_layer_still_fits():
    """torch limits an operator to 64 arguments; mogrifier_lstm_pair gets every option twice."""
    schemas = [s for s in torch._C._jit_get_all_schemas() if s.name.startswith("fusedseq::")]
    assert max(len(schema.arguments) for schema in schemas) <= 64 - 2


def test_cuda_sources_and_what_they_include_see_no_torch():
    """nvcc compiles a file in 2 s without torch's headers, and in 70 s with them."""
    folders = ("cuda", "math", "cpu")
    torch_free = [p for f in folders for p in (ROOT / "csrc" / f).rglob("*") if p.is_file()]
    torch_free.append(ROOT / "csrc/python/_C.cpp")
    seen = set()
    while torch_free:
        path = torch_free.pop().resolve()
        if path in seen:
            continue
        seen.add(path)
        for name in re.findall(r'^\s*#\s*include\s*[<"]([^>"]+)[>"]', path.read_text(), re.M):
            assert not re.match(r"(torch|ATen|c10)\b", name), (
                f"{path.relative_to(ROOT)} includes {name}"
            )
            if (ROOT / "csrc" / name).is_file():
                torch_free.append(ROOT / "csrc" / name)
    assert ROOT / "csrc/cpu/kernels.cpp" in seen


def test_includes_are_written_from_csrc():
    for path in (ROOT / "csrc").rglob("*"):
        if path.suffix not in (".h", ".cpp", ".cu", ".cuh"):
            continue
        for name in re.findall(r'^\s*#\s*include\s*"([^"]+)"', path.read_text(), re.M):
            assert (ROOT / "csrc" / name).is_file(), f"{path.relative_to(ROOT)} includes {name}"


def test_operators_use_the_stable_abi_alone():
    """A header of ATen or c10 would tie the library to one version of torch."""
    stable = ("torch/csrc/stable/", "torch/headeronly/", "torch/csrc/inductor/aoti_torch/c/")
    for path in (ROOT / "csrc/ops").iterdir():
        for name in re.findall(r"#\s*include\s*<((?:torch|ATen|c10)[^>]*)>", path.read_text()):
            assert name.startswith(stable), f"{path.name} includes {name}"


def test_no_device_decision_is_made_in_python():
    """The dispatcher chooses the kernel of a device. These files only report or check its choice,
    or call cuDNN, which no registered operator can."""
    exceptions = ("explain.py", "check.py", "lstm_cudnn.py", "cudnn_recurrence.py")
    for part in ("fused", "nn", "models"):
        for path in files(part):
            if path.name in exceptions:
                continue
            found = re.findall(r"\.is_cuda\b|device\.type\s*[=!]=", path.read_text())
            assert not found, f"{path.relative_to(ROOT)} has {found}"


def test_every_registered_operator_belongs_to_a_public_one():
    """An operator is called `<op>`, `<op>_backward`, ... after its public function."""
    schemas = [s.name for s in torch._C._jit_get_all_schemas() if s.name.startswith("fusedseq::")]
    assert schemas
    for name in {s.removeprefix("fusedseq::") for s in schemas} - {"gemm_rate"}:
        public = [*OPERATORS, "nt_asgd"]
        assert any(name == op or name.startswith(op + "_") for op in public), name


def test_paths_in_text_exist():
    """A path in a comment, docstring or page names a file or folder of the repository."""
    roots = "csrc|kernels|tests|bench|tools|docs|examples|pyext/fusedseq"
    paths = re.compile(rf"(?<![\w./-])(?:{roots})/[\w/.-]*\w")
    tracked = [path.relative_to(ROOT).as_posix() for path in tracked_files()]
    made_by_tests = {"csrc/ops/probe.cpp", "csrc/cuda/probe.cu", "tests/tests.json"}
    placeholders = {"bench/results/FILE.json", "bench/results/OLD.json"}
    for name in tracked:
        path = ROOT / name
        is_text = path.suffix not in (".png", ".svg", ".json")
        if not is_text or name.startswith(("bench/results", "CHANGELOG")):
            continue
        for found in {*paths.findall(path.read_text())} - made_by_tests - placeholders:
            exists = (ROOT / found).exists() or any(other.startswith(found) for other in tracked)
            assert exists, f"{name} names {found}"


def test_the_package_shows_what_it_has():
    """Its parts are imported at the first use, of which a shell and a type checker must know."""
    import fusedseq

    names = dir(fusedseq)
    assert {"accelerate", "dropout_mask", "quantize_", "decoding", "models", "optim"} <= {*names}
    for name in names:
        assert getattr(fusedseq, name) is not None
