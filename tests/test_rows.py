"""The rows of the documents: each is a preset or a command, and the results that are kept of them are what the table says."""

import importlib
import json
import re
from argparse import Namespace
from itertools import product

import pytest
from fusedseq import cli
from fusedseq.tasks import figures, finished, train
from fusedseq.tasks.catalog import TASKS, task_module
from fusedseq.tasks.result import changes, command
from fusedseq.tasks.rows import EXTRAS, ROWS, rows
from fusedseq.tasks.training import as_dict, override

from bench import rows as kept

PRESETS = [f"{task}/{preset}" for task in TASKS for preset in task_module(task).PRESETS]


def parsed(line):
    """The arguments of a command, parsed by it."""
    fusedseq, name, *words = line.split()
    assert fusedseq == "fusedseq"
    parser = cli.Parser()
    importlib.import_module(cli.COMMANDS[name][0]).add_arguments(parser)
    return parser.parse_args(words)


def test_every_preset_is_a_row_and_every_row_a_preset_or_a_command():
    trained = {name for name, row in ROWS.items() if row.preset}
    assert trained | {*EXTRAS} == {*PRESETS}
    assert not trained & {*EXTRAS}


@pytest.mark.parametrize("row", ROWS.values(), ids=list(ROWS))
def test_a_row_is_one_command(row):
    assert row.task in TASKS
    assert (row.source is None) == (not row.figures and row.said is None)
    args = parsed(row.command)
    assert args.task == row.task
    if row.preset is not None:
        assert args.preset == row.preset


@pytest.mark.parametrize("row", [row for row in rows() if row.figures], ids=lambda row: row.name)
def test_figures_are_of_a_split_or_of_a_run(row):
    for name, figure in row.figures.items():
        split, _, rest = name.partition(" ")
        assert name in figures.ABOUT_A_RUN or (split in ("train", *task_splits(row.task)) and rest), name
        assert 0 <= figure <= 1 if name.endswith("accuracy") else figure > 0


def task_splits(task):
    return task_module(task).Task.splits if task in ("words", "ptb", "reverse") else ("valid", "test")


def test_the_grid_is_the_documents_table():
    names = {f"en-fr/grid-{n}-{h}-{e}-{p}" for n, h, e, p in product((2, 3), (5, 10), (100, 300), (0.1, 0.3))}
    assert names == {name for name in ROWS if name.startswith("en-fr/grid-")}
    best = max((row for row in rows("en-fr") if "grid-" in row.name), key=lambda row: row.figures["test bleu"])
    assert ROWS["en-fr/base"].figures == ROWS["en-fr/grid-3-5-300-0.3"].figures
    assert best.figures["test bleu"] == ROWS["en-fr/base"].figures["test bleu"]


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A finished run of ptb/lstm, made smaller."""
    out = tmp_path_factory.mktemp("runs") / "small"
    sets = [word for change in ("model.embedding=16", "model.hidden=16", "layers=1", "batch=20", "tied=true")
            for word in ("--set", change)]  # fmt: skip
    options = "--data", "synthetic", "--epochs", "2", "--seed", "3", "--ops", "reference", "--out", str(out)
    assert cli.main(["train", "ptb", "--preset", "lstm", *options, *sets]) == 0
    return out


def test_a_result_repeats_itself(run):
    """Its command gives its settings, and says what differs from the preset and nothing else."""
    result = json.loads((run / "result.json").read_text())
    args = parsed(result["command"])
    settings = override(train.task_module("ptb").PRESETS[args.preset], args.assignments)
    again = train._override(settings, args)
    assert json.loads(json.dumps(as_dict(again))) == result["settings"]
    assert (args.seed, args.ops, args.epochs) == (3, "reference", 2)
    assert {*result["changes"]} == {"model.embedding", "model.hidden", "model.layers", "model.tied", "data.batch"}
    assert result["data"]["name"] == "synthetic"
    assert result["seconds per epoch"] == pytest.approx(result["seconds"] / 2, abs=1e-3)
    assert str(run) not in json.dumps(result)


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_differs_from_itself_in_nothing(name):
    task, preset = name.split("/")
    settings = as_dict(task_module(task).PRESETS[preset])
    for form in (settings, json.loads(json.dumps(settings))):
        what = {"task": task, "preset": preset, "settings": form, "seed": 0}
        assert changes(what) == {}
        assert command(what | {"ops": train.preset_operators(task_module(task), preset)}) == (
            f"fusedseq train {task} --preset {preset}"
        )


def test_a_run_of_a_study_is_told_by_the_default_preset():
    """Its own name is no preset's."""
    settings = override(task_module("reverse").PRESETS["base"], ["layers=2"])
    what = {"task": "reverse", "preset": "trial-7", "settings": as_dict(settings), "seed": 0, "ops": "fused"}
    assert command(what) == "fusedseq train reverse --preset base --set model.layers=2"


def test_lists_and_none_are_said_as_settings():
    module = task_module("ptb")
    settings = override(module.PRESETS["awd-merity"], ["model.hidden=30,20,10", "clip=none", "steps=7", "epochs=none"])
    what = {"task": "ptb", "preset": "awd-merity", "settings": as_dict(settings), "seed": 0, "ops": "fused"}
    args = parsed(command(what))
    assert train._override(override(module.PRESETS["awd-merity"], args.assignments), args) == settings


def test_list_shows_rows_and_runs(run, capsys):
    assert cli.main(["list", "ptb", "--runs", str(run.parent)]) == 0
    shown = capsys.readouterr().out
    assert "ptb/mogrifier-awd-1150" in shown
    assert "words/base" not in shown
    assert "2 epochs" in shown
    assert cli.main(["list", "ptb", "--json", "--runs", str(run.parent)]) == 0
    lines = {row["name"]: row for row in json.loads(capsys.readouterr().out)}
    assert lines["ptb/lstm"]["figures"] == {"test perplexity": 132.29}
    assert lines["ptb/lstm"]["results"][-1]["test"]["perplexity"] > 1
    assert len(lines["ptb/lstm"]["results"][-1]["validations"]) == 2
    assert cli.main(["list", "--runs", str(run / "none")]) == 2
    assert "no such directory" in capsys.readouterr().err


def test_a_run_is_taken_in_and_told(run, tmp_path, capsys):
    root = tmp_path / "repository"
    (root / "docs").mkdir(parents=True)
    options = "--label", "small", "--note", f"cut short in {run}/", "--results", str(root / finished.FOLDER)
    assert kept.main(["add", str(run), *options]) == 0
    (path,) = (root / finished.FOLDER).iterdir()
    assert path.name == "ptb-lstm-small.json"
    assert str(run.parent) not in path.read_text()
    assert kept.main(["table", "--root", str(root)]) == 0
    (line,) = [line for line in (root / "docs/results.md").read_text().splitlines() if "ptb/lstm" in line]
    result = json.loads(path.read_text())
    for text in ("ptb/lstm (small)", "132.29", f"{result['test']['perplexity']:.2f}", "2 epochs", "model.hidden 16", "of 2 epochs",
                 result["command"], "cut short in"):  # fmt: skip
        assert text in line, text
    if "not installed" not in capsys.readouterr().out:
        assert (root / "docs/curves-ptb.png").read_bytes().startswith(b"\x89PNG")
    assert kept.main(["add", str(run), "--row", "ptb/none", *options]) == 2
    assert "no such row: ptb/none" in capsys.readouterr().err


def test_a_result_of_before_is_completed(run, tmp_path):
    """Runs that were begun before results had commands."""
    result = json.loads((run / "result.json").read_text())
    later = ("command", "changes", "data", "machine", "versions", "commit", "dirty", "date")
    before = {key: value for key, value in result.items() if key not in later}
    args = Namespace(row=None, label=None, note=None, data="ptb")
    completed = kept.taken_in(before, args)
    assert completed["command"] == result["command"]
    assert completed["machine"] == result["machine"]
    assert completed["data"] == {"name": "ptb"}


def test_figures_that_were_evaluated_later_are_taken_in(run, tmp_path):
    (tmp_path / "a.json").write_text(json.dumps({"test": {"temperature": 0.9}, "valid": {"loss": 1.5}}))
    options = "--eval", str(tmp_path / "a.json"), "--results", str(tmp_path)
    assert kept.main(["add", str(run), *options]) == 0
    result, before = (json.loads(path.read_text()) for path in (tmp_path / "ptb-lstm.json", run / "result.json"))
    assert result["test"] == before["test"] | {"temperature": 0.9}
    assert result["valid"]["loss"] == 1.5
    assert result["command"] == before["command"]
    assert kept.evaluated(result | {"row": "en-es/beam"}, {})["command"].endswith(ROWS["en-es/beam"].command)


def test_bleu_is_shown_in_both_definitions():
    found = figures.of_result(ROWS["en-fr/base"], {"test": {"bleu": 0.2, "sacrebleu": 21.5}, "validations": []})
    assert found == ["test bleu 0.2", "test sacrebleu 21.5"]


@pytest.mark.parametrize("row", ROWS.values(), ids=lambda row: row.name)
def test_every_row_can_tell_a_whole_result(row):
    """With everything that a run writes of itself."""
    of_a_run = {"seconds": 60.0, "seconds per epoch": 30.0, "parameters": 10, "validations": []}
    splits = {name.partition(" ")[0]: {} for name in row.figures if name not in figures.ABOUT_A_RUN}
    for name in row.figures:
        if name not in figures.ABOUT_A_RUN:
            split, _, figure = name.partition(" ")
            splits[split][figure] = 0.5
    result = {**of_a_run, "test": {"loss": 0.5}, **splits}
    said = figures.of_result(row, result)
    wanted = [name for name in row.figures if not name.startswith("train ")]  # those stand in the validations
    assert {figures.text(name, figures.value(result, name)) for name in wanted} <= set(said)


@pytest.mark.parametrize(("text", "left"), [
    ("/home/a/data/ptb", "ptb"), ("~/x.bin and ../y/z", "x.bin and z"), ("--data /data", "--data data"),
    ("en-es/base at 3 tokens/s, 1/4", "en-es/base at 3 tokens/s, 1/4"),
])  # fmt: skip
def test_paths_are_not_kept(text, left):
    assert kept.without_paths({"a": [text, 3]}) == {"a": [left, 3]}


def test_docs_are_what_the_results_say():
    """Where it fails: python -m bench.rows table"""
    assert (kept.ROOT / "docs/results.md").read_text() == kept.markdown(finished.committed())


@pytest.mark.parametrize("path", sorted((kept.ROOT / finished.FOLDER).glob("*.json")), ids=lambda path: path.stem)
def test_a_kept_result_is_whole_and_names_no_path(path):
    text = path.read_text()
    result = json.loads(text)
    assert result["row"] in ROWS
    assert kept.without_paths(result) == result
    assert not re.search(r'"/|/(home|work|tmp|root)/', text)
    assert {"machine", "versions", "date", "seconds", "command"} <= {*result}
