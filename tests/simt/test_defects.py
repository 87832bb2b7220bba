"""The changes by which the other files put defects into sources: each changes a text that occurs
once. Of their tests, which compile for minutes, CI runs a part; these run all."""

import ast
from pathlib import Path

import pytest

HERE = Path(__file__).parent
SOURCES = {path.name: path for path in (HERE.parents[1] / "csrc").rglob("*.*")}


def changes(path):
    """The tuples (source, old text, new text) in a test file."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Tuple) and len(node.elts) >= 3:
            texts = [part.value for part in node.elts[:3] if isinstance(part, ast.Constant)]
            if len(texts) == 3 and all(isinstance(text, str) for text in texts):
                name = texts[0].rpartition("/")[2]
                if name in SOURCES:
                    yield name, *texts[1:]


def test_the_changes_are_found():
    assert sum(len(list(changes(path))) for path in HERE.glob("test_*.py")) > 50


@pytest.mark.parametrize("path", sorted(HERE.glob("test_*.py")), ids=lambda path: path.stem)
def test_a_defect_changes_a_text_that_occurs_once(path):
    for name, old, new in changes(path):
        assert SOURCES[name].read_text().count(old) == 1, (name, old)
        assert old != new
