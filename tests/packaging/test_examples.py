"""The examples and the code in Markdown pages run as printed, and the pages say what is true."""

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from fusedseq import fused, reference
from fusedseq.testing import CASES, differentiable

ROOT = Path(__file__).parents[2]
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
FASTER = {"train_mogrifier.py": ["--steps", "3"]}  # arguments that make an example short
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
DTYPES = {
    "fp32": torch.float32,
    "fp64": torch.float64,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
}


def python(*arguments, folder):
    """Runs Python in `folder` with this repository's package; returns what it printed."""
    environment = os.environ | {"PYTHONPATH": str(ROOT / "pyext"), "OMP_NUM_THREADS": "1"}
    process = subprocess.run(
        [sys.executable, *map(str, arguments)],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert process.returncode == 0, process.stdout + process.stderr
    return process.stdout


def code_blocks():
    """Every Python block of the pages; those that include an example are not marked as Python."""
    fence = re.compile(r"^```python\n(.*?)^```", re.DOTALL | re.MULTILINE)
    return [
        pytest.param(block, id=f"{page.relative_to(ROOT)}-{number}")
        for page in PAGES
        for number, block in enumerate(fence.findall(page.read_text()))
    ]


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.name)
def test_an_example_runs(path, tmp_path):
    assert python(path, *FASTER.get(path.name, []), folder=tmp_path)


def test_there_are_nine_short_examples():
    lengths = {path.name: len(path.read_text().splitlines()) for path in EXAMPLES}
    assert len(lengths) == 9
    assert all(20 <= length <= 60 for length in lengths.values()), lengths
    shown = re.findall(r'"examples/(\w+\.py)"', (ROOT / "docs/examples.md").read_text())
    assert {*shown} == {*lengths}


@pytest.mark.parametrize("block", code_blocks())
def test_code_in_a_page_runs_as_printed(block, tmp_path):
    python("-c", block, folder=tmp_path)


def test_the_readme_is_short():
    text = (ROOT / "README.md").read_text()
    assert len(text.splitlines()) <= 150
    (example,) = re.findall(r"^```python\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
    assert len([line for line in example.splitlines() if line]) <= 16


@pytest.mark.parametrize("page", ["README.md", "docs/index.md"])
def test_a_page_has_the_number_of_operators(page):
    text = (ROOT / page).read_text()
    assert re.findall(r"Each of its (\d+)\s+\[?operators", text) == [str(len(reference.__all__))]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_between_files_lead_somewhere(page):
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)
    text = re.sub(r"`[^`\n]*`", "", text)
    targets = re.findall(r"\]\(([^)#:]+)[^)]*\)", text)
    targets += re.findall(r'(?:src|srcset)="([^"]+)"', text)
    generated = {path.parent / f"{path.stem}.md" for path in operator_pages()}
    missing = [
        target
        for target in targets
        if not (page.parent / target).exists() and (page.parent / target) not in generated
    ]
    assert not missing, f"{page.name} links to {missing}"


def operator_pages():
    """The pages that docs/hooks/operator_pages.py generates."""
    return [ROOT / f"docs/operators/{op}.md" for op in [*reference.__all__, "index"]]


@pytest.mark.parametrize("op", reference.__all__)
def test_the_documented_dtypes_are_those_of_the_cpu_kernels(op):
    yaml = pytest.importorskip("yaml")
    facts = yaml.safe_load((ROOT / "docs/operators/facts.yml").read_text())
    assert [*facts] == reference.__all__
    if "dtypes" not in facts[op]:
        return
    documented = facts[op]["dtypes"]["cpu"].split(", ")
    sizes = {case: len(differentiable(*case.inputs())) for case in CASES if case.op == op}
    case = max(sizes, key=sizes.get)
    for name, dtype in DTYPES.items():
        args, kwargs = case.inputs("cpu", dtype)
        if name in documented:
            getattr(fused, op)(*args, **kwargs)
        else:
            with pytest.raises(TypeError, match="must be"):
                getattr(fused, op)(*args, **kwargs)


@pytest.mark.parametrize(
    ("docstring", "markdown"),
    [
        ("One sentence.\ncontinued < here.", "One sentence. continued &lt; here."),
        (
            "x: (T, B, X)    h0, c0: (B, H)\nreturns (T, B, H)",
            "- `x`: (T, B, X)\n- `h0`, `c0`: (B, H)\n- **returns** (T, B, H)",
        ),
        ("p: in [0, 1], or\n    None", "- `p`: in [0, 1], or None"),
        ("p: a number\nof things    q: more", "- `p`: a number of things\n- `q`: more"),
        ("p: a number\nThe rest is prose.", "- `p`: a number\n\nThe rest is prose."),
        ("Forward and\nbackward: fast.", "Forward and backward: fast."),
        ("Errors: for\nCUDA tensors.", "- **Errors**: for CUDA tensors."),
        ("Returns a tensor.\n\nreturns (T, B)", "Returns a tensor.\n\n- **returns** (T, B)"),
        ("    y = 2 * x", "    y = 2 * x"),
    ],
)
def test_docstrings_become_markdown_lists(docstring, markdown):
    pytest.importorskip("griffe")
    path = ROOT / "docs/hooks/docstring_arguments.py"
    spec = importlib.util.spec_from_file_location("docstring_arguments", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert module.to_markdown(docstring) == markdown
