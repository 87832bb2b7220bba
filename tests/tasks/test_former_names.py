"""Runs made before a setting was renamed can still be evaluated, resumed and repeated."""

import json

import pytest
from fusedseq import cli
from fusedseq.tasks import ptb
from fusedseq.tasks.runs.result import changes
from fusedseq.tasks.training import load_checkpoint, override, save_checkpoint
from fusedseq.tasks.training.former_names import current_key, with_current_names

SMALL = ("embedding=8", "hidden=8", "layers=2", "tied=true", "batch=20")
CHECKPOINTS = ("best.safetensors", "last.safetensors")


def train(out, weight_drop, *options):
    sets = [word for change in (*SMALL, weight_drop) for word in ("--set", change)]
    data = ("--data", "synthetic", "--seed", "3", "--out", str(out))
    return cli.main(["train", "ptb", "--preset", "lstm", *data, *sets, *options])


def with_former_name(settings):
    model = dict(settings["model"])
    model["weight_dropout"] = model.pop("weight_drop")
    return settings | {"model": model}


@pytest.fixture
def old_run(tmp_path, monkeypatch):
    """A run whose checkpoints and result have the name weight_dropout."""
    out = tmp_path / "old"
    assert train(out, "weight_drop=0.25", "--steps", "2") == 0
    for name in CHECKPOINTS:
        state = load_checkpoint(out / name)
        settings = with_former_name(state["description"]["settings"])
        save_checkpoint(
            out / name, state | {"description": state["description"] | {"settings": settings}}
        )
    result = json.loads((out / "result.json").read_text())
    result["settings"] = with_former_name(result["settings"])
    (out / "result.json").write_text(json.dumps(result))
    return out


def test_an_old_checkpoint_is_evaluated(old_run, capsys):
    capsys.readouterr()
    options = ("--data", "synthetic", "--splits", "test", "--json")
    assert cli.main(["eval", "ptb", str(old_run), *options]) == 0
    result = json.loads((old_run / "result.json").read_text())
    loss = json.loads(capsys.readouterr().out)["test"]["loss"]
    assert loss == pytest.approx(result["test"]["loss"], rel=1e-5)


def test_an_old_run_is_resumed(old_run):
    (old_run / "result.json").unlink()
    assert train(old_run, "weight_drop=0.25", "--steps", "4", "--resume") == 0
    description = load_checkpoint(old_run / "last.safetensors")["description"]
    assert description["settings"]["model"]["weight_drop"] == 0.25


def test_an_old_run_is_not_resumed_with_another_weight_drop(old_run, capsys):
    assert train(old_run, "weight_drop=0.5", "--steps", "4", "--resume") != 0
    assert "model.weight_drop 0.25, got 0.5" in capsys.readouterr().err


def test_the_changes_of_an_old_result_have_the_current_name(old_run):
    result = json.loads((old_run / "result.json").read_text())
    assert changes(result)["model.weight_drop"] == 0.25


def test_the_command_line_takes_the_former_name():
    for key in ("weight_dropout", "model.weight_dropout", "weight_drop", "model.weight_drop"):
        settings = override(ptb.PRESETS["lstm"], [f"{key}=0.5"])
        assert settings.model.weight_drop == 0.5


def test_an_old_study_is_continued(tmp_path):
    pytest.importorskip("optuna")
    from fusedseq.tasks.studies.trials import Trials

    storage, space = f"journal:///{tmp_path}/study.log", {"model.layers": (1, 2)}
    for key in ("model.weight_dropout", "model.weight_drop"):
        Trials(storage, "old", tmp_path, space, begun={key: 0.25})
    with pytest.raises(ValueError, match=r"model\.weight_drop 0\.25, got 0\.5"):
        Trials(storage, "old", tmp_path, space, begun={"model.weight_drop": 0.5})


def test_other_keys_and_settings_stay():
    assert current_key("training.weight_dropout") == "training.weight_dropout"
    settings = {"model": {"dropout": 0.5, "weight_dropout": 0.1}, "seed": 3}
    assert with_current_names(settings) == {
        "model": {"dropout": 0.5, "weight_drop": 0.1},
        "seed": 3,
    }
