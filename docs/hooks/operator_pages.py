"""MkDocs hook: generates one page for each operator, and the overview of all operators.

A page is the template operator_page.md, filled in from `CPU_KERNELS` of fused/explain_cpu.py, the
committed benchmark results and docs/operators/facts.yml; mkdocstrings renders the docstrings. All
of these are read as files. Nothing of fusedseq is imported, so the site builds without torch and
without the compiled library.
"""

import ast
import functools
import json
from pathlib import Path
from string import Template
from typing import Any

import yaml
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "pyext/fusedseq"
HEADER = "| case | measured | fused | PyTorch | compiled | torch's operator | speed-up |"
NO_CASE = "It has no benchmark case of its own. [Benchmarks](../benchmarks.md) has all cases."
COLUMNS = """Times are medians in milliseconds. *PyTorch* is what a good PyTorch user would write,
*compiled* the same under `torch.compile`, and *torch's operator* a single operator of torch that
computes the same, where there is one. [Benchmarks](../benchmarks.md) says how they were timed."""


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Adds the operators' pages to the navigation, below `Operators`."""
    for entry in config.nav or []:
        if "Operators" in entry:
            entry["Operators"] += [{op: f"operators/{op}.md"} for op in operators()]
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Adds the generated pages to the site."""
    facts = yaml.safe_load((ROOT / "docs/operators/facts.yml").read_text())
    if [*facts] != operators():
        raise PluginError(
            f"docs/operators/facts.yml must describe {', '.join(operators())} in this order, "
            f"got {', '.join(facts)}"
        )
    kernels = cpu_kernels()
    pages = {op: operator_page(op, about, kernels[op]) for op, about in facts.items()}
    pages["index"] = filled("operators_page.md", table="\n".join(map(overview, facts.items())))
    for name, text in pages.items():
        files.append(File.generated(config, f"operators/{name}.md", content=text))
    return files


def operators() -> list[str]:
    """The names in `fusedseq.reference.__all__`, which are those of the operators."""
    return literal(PACKAGE / "reference/__init__.py", "__all__")


def cpu_kernels() -> dict[str, tuple[str, str]]:
    """{operator: (file of its CPU kernel, description)}, which `fused.explain` prints."""
    return literal(PACKAGE / "fused/explain_cpu.py", "CPU_KERNELS")


def literal(path: Path, name: str) -> Any:
    """The value of a module-level constant, read without importing the module."""
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.Assign):
            targets = node.targets
        elif isinstance(node, ast.AnnAssign) and node.value:
            targets = [node.target]
        else:
            continue
        if any(isinstance(target, ast.Name) and target.id == name for target in targets):
            return ast.literal_eval(node.value)
    raise PluginError(f"{path} must define the constant {name}")


def filled(template: str, **values: str) -> str:
    return Template((ROOT / "docs/hooks" / template).read_text()).substitute(values)


def operator_page(op: str, facts: dict[str, Any], cpu_kernel: tuple[str, str]) -> str:
    file, what = cpu_kernel
    return filled(
        "operator_page.md",
        op=op,
        summary=facts["summary"],
        modules=f"Modules that use it: {modules(facts)}." if "modules" in facts else "",
        speed=speed(op),
        cpu_file=existing(file),
        cpu_what=what,
        more_cpu="".join(map(more_cpu, facts.get("more_cpu", {}).items())),
        cuda=cuda(facts["cuda"]),
        registered=existing(facts["registered"]),
        limits="\n".join(f"- {limit}" for limit in limits(facts)),
    )


def modules(facts: dict[str, Any]) -> str:
    names = facts.get("modules", [])
    return ", ".join(f"[`nn.{name}`](../modules.md#fusedseq.nn.{name})" for name in names)


def overview(item: tuple[str, dict[str, Any]]) -> str:
    op, facts = item
    return f"| [`{op}`]({op}.md) | {facts['summary']} | {modules(facts)} |"


def more_cpu(item: tuple[str, str]) -> str:
    file, what = item
    return f"\n- CPU: `{existing(file)}`: {what}."


def cuda(kernel: dict[str, str]) -> str:
    file = f"`{existing(kernel['file'])}`: " if "file" in kernel else ""
    return file + kernel["what"]


def limits(facts: dict[str, Any]) -> list[str]:
    dtypes = facts.get("dtypes")
    shown = [f"Dtypes: {dtypes['cpu']} on a CPU; {dtypes['cuda']} on CUDA."] if dtypes else []
    return shown + facts.get("limits", [])


def existing(path: str) -> str:
    if not (ROOT / path).exists():
        raise PluginError(f"an operator's page names {path}, which does not exist")
    return path


def speed(op: str) -> str:
    """A table of the operator's benchmark cases for every committed result file that has some.

    Of a case that was measured several times on a machine, with the same MKL, the latest counts.
    """
    latest: dict[tuple[Any, ...], Path] = {}
    for path, document in sorted(suite_results().items(), key=lambda item: item[1]["date"]):
        for case in document["rows"]:
            latest[measured_as(document, case)] = path
    tables = []
    for path, document in suite_results().items():
        cases = [
            case
            for case in document["rows"]
            if case["op"] == op and latest[measured_as(document, case)] == path
        ]
        if cases:
            tables.append(f"{conditions(document, path)}\n\n{speed_table(cases)}")
    return "\n\n".join([*tables, COLUMNS]) if tables else NO_CASE


@functools.cache
def suite_results() -> dict[Path, dict[str, Any]]:
    """{path: the result file} of the committed results of the benchmark suite.

    Not whole training steps, nor what docs/benchmarks shows in tables of its own, nor the results
    of `make gpu`, which docs/gpu-status.md shows.
    """
    found = {}
    for path in sorted((ROOT / "bench/results").glob("*.json")):
        document = json.loads(path.read_text())
        is_other = not {"peers", "recurrence profile", "ceilings"}.isdisjoint(document)
        if not is_other and isinstance(document.get("rows"), list):
            found[path] = document
    return found


def measured_as(document: dict[str, Any], case: dict[str, Any]) -> tuple[Any, ...]:
    """What results of one case on one machine have in common."""
    machine = document["machine"]
    where = machine["gpu"] if document["device"] == "cuda" else machine["cpu"]
    return where, document.get("mkl"), case["name"], case["mode"], case["dtype"]


def conditions(document: dict[str, Any], path: Path) -> str:
    machine, versions = document["machine"], document["versions"]
    where = machine["gpu"] if document["device"] == "cuda" else machine["cpu"]
    mkl = ", MKL allowed to use AVX-512" if document.get("mkl") == "unthrottled" else ""
    return (
        f"{where}, {machine['cores']} cores, torch {versions['torch']}{mkl}, "
        f"{document['date'][:10]} (`bench/results/{path.name}`):"
    )


def speed_table(cases: list[dict[str, Any]]) -> str:
    return "\n".join([HEADER, "|---|---|--:|--:|--:|--:|---|", *map(speed_line, cases)])


def speed_line(case: dict[str, Any]) -> str:
    median = case["median"]
    times = [milliseconds(median.get(name)) for name in ("fused", "eager", "compiled", "torch")]
    ratios = [
        f"{median[provider] / median['fused']:.2f}× {label}"
        for provider, label in (("eager", "PyTorch"), ("torch", "torch's operator"))
        if provider in median
    ]
    name = case["name"].removeprefix(f"{case['op']}-").removesuffix("-forward")
    cells = [name, f"{case['mode']}, {case['dtype']}", *times, ", ".join(ratios)]
    return f"| {' | '.join(cells)} |"


def milliseconds(seconds: float | None) -> str:
    """The time with three digits; the empty string for a provider that was not measured."""
    if seconds is None:
        return ""
    return f"{1000 * seconds:,.0f}" if seconds >= 0.1 else f"{1000 * seconds:.3g}"
