"""The documented experiments: presets, commands, metrics, and the results the package carries."""

import importlib
import json
import shlex
from itertools import product
from pathlib import Path

import pytest
from fusedseq import cli
from fusedseq.tasks.catalog import TASKS, task_module
from fusedseq.tasks.commands import train
from fusedseq.tasks.experiments import metrics, results
from fusedseq.tasks.experiments.documented import EXPERIMENTS, EXTRAS, experiments
from fusedseq.tasks.runs.result import changes, command, data_name
from fusedseq.tasks.training import as_dict, override

PRESETS = [f"{task}/{preset}" for task in TASKS for preset in task_module(task).PRESETS]
REPORTING = [experiment for experiment in experiments() if experiment.metrics]


def parsed(line):
    """The arguments of a command, parsed by its own parser."""
    fusedseq, name, *words = shlex.split(line)
    assert fusedseq == "fusedseq"
    parser = cli.Parser()
    importlib.import_module(cli.COMMANDS[name][0]).add_arguments(parser)
    return parser.parse_args(words)


def test_every_preset_is_an_experiment_or_listed_as_an_extra():
    trained = {name for name, experiment in EXPERIMENTS.items() if experiment.preset}
    assert trained | {*EXTRAS} == {*PRESETS}
    assert not trained & {*EXTRAS}


@pytest.mark.parametrize("experiment", EXPERIMENTS.values(), ids=list(EXPERIMENTS))
def test_every_experiment_has_a_command_that_parses(experiment):
    assert experiment.task in TASKS
    assert (experiment.source is None) == (not experiment.metrics and experiment.remark is None)
    args = parsed(experiment.command)
    assert args.task == experiment.task
    if experiment.preset is not None:
        assert args.preset == experiment.preset


@pytest.mark.parametrize("experiment", REPORTING, ids=lambda experiment: experiment.name)
def test_a_metric_belongs_to_a_split_or_to_the_run(experiment):
    for name, value in experiment.metrics.items():
        split, _, metric = name.partition(" ")
        in_split = split in ("train", *splits_of(experiment.task)) and metric
        assert name in metrics.ABOUT_A_RUN or in_split, name
        assert 0 <= value <= 1 if name.endswith("accuracy") else value > 0


def splits_of(task):
    has_class = task in ("words", "ptb", "reverse")
    return task_module(task).Task.splits if has_class else ("valid", "test")


def test_the_grid_is_the_reported_table():
    names = {
        f"en-fr/grid-{n}-{h}-{e}-{p}"
        for n, h, e, p in product((2, 3), (5, 10), (100, 300), (0.1, 0.3))
    }
    grid = [experiment for experiment in experiments("en-fr") if "grid-" in experiment.name]
    assert names == {experiment.name for experiment in grid}
    best = max(grid, key=lambda experiment: experiment.metrics["test bleu"])
    base = EXPERIMENTS["en-fr/base"]
    assert base.metrics == EXPERIMENTS["en-fr/grid-3-5-300-0.3"].metrics
    assert best.metrics["test bleu"] == base.metrics["test bleu"]


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A finished run of ptb/lstm with a smaller model."""
    out = tmp_path_factory.mktemp("runs") / "small"
    sets = [
        word
        for change in ("model.embedding=16", "model.hidden=16", "layers=1", "batch=20", "tied=true")
        for word in ("--set", change)
    ]
    options = ["--data", "synthetic", "--epochs", "2", "--seed", "3", "--ops", "reference"]
    options += ["--out", str(out)]
    assert cli.main(["train", "ptb", "--preset", "lstm", *options, *sets]) == 0
    return out


def test_the_command_of_a_result_reproduces_its_settings(run):
    """It sets what differs from the preset, and nothing else."""
    result = json.loads((run / "result.json").read_text())
    args = parsed(result["command"])
    settings = train.with_changes(task_module("ptb").PRESETS[args.preset], args)
    assert json.loads(json.dumps(as_dict(settings))) == result["settings"]
    assert (args.seed, args.ops, args.epochs) == (3, "reference", 2)
    assert {*result["changes"]} == {
        "model.embedding",
        "model.hidden",
        "model.layers",
        "model.tied",
        "data.batch",
    }
    assert result["data"]["name"] == "synthetic"
    assert result["seconds per epoch"] == pytest.approx(result["seconds"] / 2, abs=1e-3)
    assert str(run) not in json.dumps(result)


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_has_no_changes_to_itself(name):
    task, preset = name.split("/")
    settings = as_dict(task_module(task).PRESETS[preset])
    for form in (settings, json.loads(json.dumps(settings))):
        what = {"task": task, "preset": preset, "settings": form, "seed": 0}
        assert changes(what) == {}
        assert command(what | {"ops": train.preset_operators(task_module(task), preset)}) == (
            f"fusedseq train {task} --preset {preset}"
        )


def test_the_command_of_a_trial_uses_the_default_preset():
    """The name of a trial is not a preset."""
    settings = override(task_module("reverse").PRESETS["base"], ["layers=2"])
    what = {
        "task": "reverse",
        "preset": "trial-7",
        "settings": as_dict(settings),
        "seed": 0,
        "ops": "fused",
    }
    assert command(what) == "fusedseq train reverse --preset base --set model.layers=2"


def test_lists_and_none_survive_the_command():
    module = task_module("ptb")
    changed = ["model.hidden=30,20,10", "clip=none", "steps=7", "epochs=none"]
    settings = override(module.PRESETS["awd-merity"], changed)
    what = {
        "task": "ptb",
        "preset": "awd-merity",
        "settings": as_dict(settings),
        "seed": 0,
        "ops": "fused",
    }
    args = parsed(command(what))
    assert train.with_changes(module.PRESETS["awd-merity"], args) == settings


def test_list_shows_experiments_and_runs(run, capsys):
    assert cli.main(["list", "ptb", "--runs", str(run.parent)]) == 0
    shown = capsys.readouterr().out
    assert "ptb/mogrifier-awd-1150" in shown
    assert "words/base" not in shown
    assert "2 epochs" in shown
    assert cli.main(["list", "ptb", "--json", "--runs", str(run.parent)]) == 0
    lines = {line["name"]: line for line in json.loads(capsys.readouterr().out)}
    assert lines["ptb/lstm"]["figures"] == {"test perplexity": 132.29}
    assert lines["ptb/lstm"]["results"][-1]["test"]["perplexity"] > 1
    assert len(lines["ptb/lstm"]["results"][-1]["validations"]) == 2
    assert cli.main(["list", "--runs", str(run / "none")]) == 2
    assert "no such directory" in capsys.readouterr().err


def test_list_shows_the_carried_results_in_any_directory(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert cli.main(["list", "--json"]) == 0
    lines = {line["name"]: line for line in json.loads(capsys.readouterr().out)}
    shown = sum(len(line["results"]) for line in lines.values())
    assert shown == sum(len(found) for found in results.carried().values()) > 80
    assert lines["ptb/mogrifier-awd"]["results"][0]["test"]["perplexity"] > 1


def test_an_excerpt_shows_the_same_as_its_result(run):
    result = results.of_run(run) | {"label": "small", "note": "cut short"}
    excerpt = results.excerpt(json.loads(json.dumps(result)))
    assert len(json.dumps(excerpt)) < len(json.dumps(result)) / 2
    for experiment in (EXPERIMENTS["ptb/lstm"], EXPERIMENTS["en-fr/base"]):
        shown = [metrics.of_result(experiment, r) for r in (excerpt, result)]
        assert shown[0] == shown[1]
    assert metrics.budget(excerpt) == metrics.budget(result)
    assert metrics.hardware(excerpt) == metrics.hardware(result)
    assert json.loads(results.packed({"ptb/lstm": [result, result]})) == [excerpt, excerpt]


def test_the_wheel_declares_the_carried_results():
    text = (Path(__file__).parents[2] / "pyproject.toml").read_text()
    assert '"fusedseq.tasks.experiments" = ["results.json"]' in text


def test_bleu_is_shown_in_both_definitions():
    result = {"test": {"bleu": 0.2, "sacrebleu": 21.5, "chrf": 40.0}, "validations": []}
    shown = metrics.of_result(EXPERIMENTS["en-fr/base"], result)
    assert shown == ["test bleu 0.2", "test sacrebleu 21.5", "test chrf 40"]


@pytest.mark.parametrize("experiment", EXPERIMENTS.values(), ids=list(EXPERIMENTS))
def test_every_reported_metric_is_shown_for_a_complete_result(experiment):
    of_a_run = {"seconds": 60.0, "seconds per epoch": 30.0, "parameters": 10, "validations": []}
    in_splits = [name for name in experiment.metrics if name not in metrics.ABOUT_A_RUN]
    splits = {name.partition(" ")[0]: {} for name in in_splits}
    for name in in_splits:
        split, _, metric = name.partition(" ")
        splits[split][metric] = 0.5
    result = {**of_a_run, "test": {"loss": 0.5}, **splits}
    shown = metrics.of_result(experiment, result)
    # Training losses are in the validations, of which this result has none.
    expected = [name for name in experiment.metrics if not name.startswith("train ")]
    texts = {metrics.text(name, metrics.value_of(result, name)) for name in expected}
    assert texts <= set(shown)


@pytest.mark.parametrize(
    ("task", "changes"),
    [
        ("reverse", ["data.sizes=500"]),
        ("ptb", ["model.splits=5", "model.hidden=(1150, 1150, 650)"]),
        ("words", ["data.vectors=my vectors.bin", "freeze=embedding.*, output.*"]),
    ],
)
def test_a_recorded_command_is_one_for_a_shell(task, changes):
    module = task_module(task)
    settings = override(module.PRESETS[module.DEFAULT_PRESET], changes)
    args = parsed(command(recorded(task, settings) | {"from": "my run"}))
    assert train.with_changes(module.PRESETS[args.preset], args) == settings
    assert args.start == Path("my run")


def recorded(task, settings):
    preset = task_module(task).DEFAULT_PRESET
    return {
        "task": task,
        "preset": preset,
        "settings": json.loads(json.dumps(as_dict(settings))),
        "seed": 0,
        "ops": "fused",
    }


def test_an_empty_tuple_is_recorded(monkeypatch):
    presets, name = task_module("ptb").PRESETS, task_module("ptb").DEFAULT_PRESET
    usual = presets[name]
    monkeypatch.setitem(presets, name, override(usual, ["model.splits=5,9"]))
    args = parsed(command(recorded("ptb", usual)))
    assert train.with_changes(presets[name], args) == usual


def test_a_value_of_another_type_than_a_tuple_is_named():
    preset = task_module("reverse").PRESETS["base"]
    assert override(preset, ["data.sizes=7"]).data.sizes == (7,)
    for value in ("many", "1,many", "2.5"):
        with pytest.raises(ValueError, match=r"data\.sizes must be whole numbers separated by"):
            override(preset, [f"data.sizes={value}"])


def test_generated_data_have_no_directory(monkeypatch):
    monkeypatch.setenv("FUSEDSEQ_DATA", "/somewhere/data")
    assert data_name("reverse", None) == "generated"
    assert data_name("ptb", None) == "data"
    assert data_name("ptb", "/somewhere/ptb") == "ptb"
