"""The page Settings lists every setting of every task with its type, default and meaning."""

import dataclasses
import importlib.util
import inspect
import re
import sys
from pathlib import Path

import pytest
from fusedseq import reference
from fusedseq.models.translator import POSITIONS
from fusedseq.models.word_predictor import POOLING
from fusedseq.tasks.catalog import TASKS, task_module
from fusedseq.tasks.training import TrainingSettings

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/settings.md").read_text()
RANGE = re.compile(r"\b(?:at least -?\d+|above 0)|in [\[(]0, 1[\])]")
# Values that some settings accept only beside others.
BESIDE = {
    "inverse-sqrt": {"warmup_steps": 1},
    "linear": {"decay_steps": 1},
    "cosine": {"decay_steps": 1},
}


def sections():
    """{name of a settings class: (its section, the class)} of all tasks."""
    found = {}
    for task in TASKS:
        settings = task_module(task).Settings()
        for field in dataclasses.fields(settings):
            kind = type(getattr(settings, field.name))
            found[kind.__name__] = field.name, kind
    return found


SECTIONS = sections()
FIELDS = [
    pytest.param(kind, field, id=f"{name}.{field.name}")
    for name, (_, kind) in SECTIONS.items()
    for field in dataclasses.fields(kind)
]


@pytest.fixture(scope="module")
def hook():
    """The module docs/hooks/settings_page.py, imported as MkDocs imports it."""
    for package in ("mkdocs", "griffe", "yaml"):
        pytest.importorskip(package)
    path = ROOT / "docs/hooks/settings_page.py"
    spec = importlib.util.spec_from_file_location("settings_page", path)
    module = importlib.util.module_from_spec(spec)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(path.parent)
        patch.setitem(sys.modules, "settings_page", module)
        spec.loader.exec_module(module)
        yield module


def documented(hook, kind, field):
    """The Setting that the page shows of a field."""
    shown = hook.settings(Path(inspect.getsourcefile(kind)), kind.__name__)
    return next(setting for setting in shown if setting.name == field.name)


def test_the_page_has_a_table_of_each_settings_class(hook):
    shown = {name: (section, file) for section, file, name in hook.MARKER.findall(PAGE)}
    package = ROOT / "pyext/fusedseq"
    assert shown == {
        name: (section, str(Path(inspect.getsourcefile(kind)).resolve().relative_to(package)))
        for name, (section, kind) in SECTIONS.items()
    }


@pytest.mark.parametrize(("kind", "field"), FIELDS)
def test_a_setting_has_a_meaning_and_its_default(hook, kind, field):
    setting = documented(hook, kind, field)
    assert len(setting.meaning.split()) > 1
    assert setting.meaning.endswith(".")
    assert setting.default == field.default


@pytest.mark.parametrize(("kind", "field"), FIELDS)
def test_the_documented_range_of_a_setting_is_the_one_that_is_checked(hook, kind, field):
    setting = documented(hook, kind, field)
    if not re.search(r"\b(int|float)\b", setting.type) or "list" in setting.type:
        return
    ranges = RANGE.findall(f"{setting.type}. {setting.meaning}")
    for value in (-1, 0, 1, 2, 3):
        if "float" in setting.type:
            value = float(value)
        accepted = not refused(kind, {field.name: value})
        assert accepted == all(is_within(value, text) for text in ranges), f"{ranges}, {value}"


def refused(kind, values):
    """The error for the values of a settings class that has defaults otherwise, or ''."""
    try:
        kind(**values)
    except ValueError as error:
        return str(error)
    return ""


def is_within(value, text):
    if text.startswith("at least"):
        return value >= int(text.split()[-1])
    if text == "above 0":
        return value > 0
    lower, upper = text.removeprefix("in ").split(", ")
    return (value >= 0 if lower[0] == "[" else value > 0) and (
        value <= 1 if upper[-1] == "]" else value < 1
    )


@pytest.mark.parametrize(("kind", "field"), FIELDS)
def test_the_values_of_a_text_are_those_that_are_accepted(hook, kind, field):
    setting = documented(hook, kind, field)
    if setting.type != "text" or field.name == "freeze":
        return
    values = {*re.findall(r'"([^"]+)"', setting.meaning), setting.default}
    known = {"positions": POSITIONS, "pooling": POOLING}.get(field.name)
    if known is not None:
        assert values == {*known}
    for value in values:
        assert not refused(kind, {field.name: value} | BESIDE.get(value, {}))
    if error := refused(kind, {field.name: "another"}):
        listed = re.search(r"must be (?:one of )?(.+), got", error)[1]
        assert values == {*re.split(r", or |, | or ", listed)}


@pytest.mark.parametrize("task", TASKS)
def test_the_page_has_what_the_default_preset_of_a_task_changes(task):
    module = task_module(task)
    preset = module.PRESETS[module.DEFAULT_PRESET]
    (row,) = re.findall(rf"^\| `{task}`, `{module.DEFAULT_PRESET}` \| (.+) \|$", PAGE, re.MULTILINE)
    assert re.findall(r"`(.+?)`", row) == changes(preset.training, TrainingSettings())
    (text,) = re.findall(
        rf"^## (?:[\w-]+ and )?{task}\b.*?(?=^## |\Z)", PAGE, re.MULTILINE | re.DOTALL
    )
    for section in ("model", "data"):
        part = getattr(preset, section)
        assert {*changes(part, type(part)())} <= {*re.findall(r"`(.+?)`", text)}


def changes(settings, defaults):
    """KEY=VALUE of every setting that differs from its default."""
    return [
        f"{field.name}={str(value).lower() if isinstance(value, bool) else value}"
        for field in dataclasses.fields(settings)
        if (value := getattr(settings, field.name)) != getattr(defaults, field.name)
    ]


def test_the_page_of_random_masks_has_every_operator_with_a_seed():
    text = (ROOT / "docs/random-masks.md").read_text()
    table = text[text.index("## Which shape the mask of an operator has") :]
    rows = [line.split("|")[1] for line in table.splitlines() if line.startswith("|")]
    listed = {op for row in rows for op in re.findall(r"\[`(\w+)`\]", row)}
    drawing = {
        op
        for op in reference.__all__
        if "seed" in inspect.signature(getattr(reference, op)).parameters
    }
    # `dropout_mask` returns the mask itself; `mogrifier_lstm_pair` has a seed in its dictionaries.
    assert listed == drawing - {"dropout_mask"} | {"mogrifier_lstm_pair"}
