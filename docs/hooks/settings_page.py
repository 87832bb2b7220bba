"""MkDocs hook: fills in the tables of docs/settings.md from the settings dataclasses.

A line `<!-- settings SECTION: FILE CLASS -->` becomes a table of the fields of a dataclass: the
type, the default and the meaning of each. The meaning is the comment above the field or after it.
The sources are read as files, as in operator_pages.py: nothing of fusedseq is imported.
"""

import ast
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from docstring_arguments import escape
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import Files
from mkdocs.structure.pages import Page
from operator_pages import PACKAGE, literal

PAGE = "settings.md"
MARKER = re.compile(r"<!-- settings (\w+): (\S+) (\w+) -->")
HEADER = "| setting | type | default | meaning |\n|---|---|---|---|"
# What a check of a settings class demands of the fields that it names.
CHECKS = {
    "at_least_one": "at least 1",
    "check_sizes": "at least 1",
    "check_probabilities": "in [0, 1]",
    "check_not_negative": "at least 0",
}
TYPES = {"int": "int", "float": "float", "bool": "true or false", "str": "text", "None": "none"}
# A comment that continues the name of its field: `rounds: int = 0  # of a Mogrifier LSTM`.
CONTINUATION = re.compile(r"(of|on|in|over|between|with) ", re.IGNORECASE)


@dataclass(frozen=True)
class Setting:
    """A field of a settings dataclass, as its source has it."""

    name: str
    type: str  # in words, with the range that the class checks
    default: Any
    meaning: str  # empty where the source has no comment


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Replaces the markers of the page by tables."""
    if page.file.src_uri != PAGE:
        return markdown
    return MARKER.sub(lambda found: table(found[1], found[2], found[3]), markdown)


def table(section: str, file: str, name: str) -> str:
    """The table of a dataclass. file: relative to the package"""
    rows = []
    for setting in settings(PACKAGE / file, name):
        if not setting.meaning:
            raise PluginError(f"{file}: {name}.{setting.name} must have a comment with its meaning")
        default = f"`{shown(setting.default)}`" if setting.default != "" else ""
        meaning = re.sub(r"\bNone\b", "`none`", escape(setting.meaning))
        rows.append(f"| `{section}.{setting.name}` | {setting.type} | {default} | {meaning} |")
    return "\n".join([HEADER, *rows])


def shown(value: Any) -> str:
    """A value as `--set` takes it."""
    if isinstance(value, tuple) and value:
        return ",".join(map(shown, value))
    return str(value).lower() if value is None or isinstance(value, bool) else str(value)


def settings(path: Path, name: str) -> list[Setting]:
    """The fields of the dataclass `name` in a source file, in their order."""
    source = path.read_text()
    module = ast.parse(source)
    classes = [n for n in module.body if isinstance(n, ast.ClassDef) and n.name == name]
    if len(classes) != 1:
        raise PluginError(f"{path} must define the class {name}")
    fields = [n for n in classes[0].body if isinstance(n, ast.AnnAssign)]
    found_ranges, lines = ranges(module, classes[0], fields), source.splitlines()
    return [
        Setting(
            field_name(field),
            ", ".join(filter(None, (words(field.annotation), found_ranges.get(field_name(field))))),
            default(module, field),
            meaning(lines, field),
        )
        for field in fields
    ]


def field_name(field: ast.AnnAssign) -> str:
    assert isinstance(field.target, ast.Name)
    return field.target.id


def words(annotation: ast.expr) -> str:
    """The type of a setting in words."""
    if isinstance(annotation, ast.BinOp):  # a union
        return f"{words(annotation.left)} or {words(annotation.right)}"
    if isinstance(annotation, ast.Subscript) and isinstance(
        annotation.slice, ast.Tuple
    ):  # tuple[int, ...]
        return f"list of {words(annotation.slice.elts[0])}"
    return TYPES[ast.unparse(annotation)]


def default(module: ast.Module, field: ast.AnnAssign) -> Any:
    """The default of a setting: a literal, or a constant of a module of fusedseq."""
    if isinstance(field.value, ast.Attribute) and isinstance(field.value.value, ast.Name):
        for node in module.body:
            names = [alias.name for alias in node.names] if isinstance(node, ast.ImportFrom) else []
            if isinstance(node, ast.ImportFrom) and field.value.value.id in names:
                folder = PACKAGE.parent / str(node.module).replace(".", "/")
                return literal(folder / f"{field.value.value.id}.py", field.value.attr)
    assert field.value is not None, f"{field_name(field)} must have a default"
    return ast.literal_eval(field.value)


def meaning(lines: list[str], field: ast.AnnAssign) -> str:
    """The comment of a field as a sentence: the lines above it, and what follows it."""
    above: list[str] = []
    for line in reversed(lines[: field.lineno - 1]):
        if not line.lstrip().startswith("#"):
            break
        above.insert(0, line.strip().removeprefix("#").strip())
    assert field.end_lineno is not None
    assert field.end_col_offset is not None
    after = lines[field.end_lineno - 1][field.end_col_offset :].partition("#")[2].strip()
    text = " ".join(filter(None, [*above, after]))
    if not text:
        return ""
    if CONTINUATION.match(text):
        text = f"{field_name(field).replace('_', ' ')} {text[0].lower()}{text[1:]}"
    starts_sentence = re.match(r"[a-z]+[ ,;](?!=)", text)  # and is no formula
    return f"{text[0].upper() if starts_sentence else text[0]}{text[1:].removesuffix('.')}."


def ranges(module: ast.Module, kind: ast.ClassDef, fields: list[ast.AnnAssign]) -> dict[str, str]:
    """{setting: its range} by the CHECKS that the class calls and the module's constant LEAST."""
    found = {}
    for call in ast.walk(kind):
        if isinstance(call, ast.Call) and isinstance(call.func, ast.Name):
            for argument in call.args[1:] if call.func.id in CHECKS else []:
                for name in named(argument, fields):
                    found[name] = CHECKS[call.func.id]
    for node in module.body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "LEAST":
            for least, names in ast.literal_eval(node.value).items():
                found |= dict.fromkeys(names, f"at least {least}")
    return found


def named(argument: ast.expr, fields: list[ast.AnnAssign]) -> list[str]:
    """The settings that an argument of a check names.

    It is a name, or *(f.name for f in fields(self) if "PART" in f.name).
    """
    if isinstance(argument, ast.Constant):
        return [argument.value]
    parts = [node.value for node in ast.walk(argument) if isinstance(node, ast.Constant)]
    return [name for name in map(field_name, fields) if all(part in name for part in parts)]
