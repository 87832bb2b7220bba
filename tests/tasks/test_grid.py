"""`fusedseq grid`: its table, resuming, and failures of single configurations."""

import json
import signal
import sys

import pytest
from fusedseq import cli
from fusedseq.tasks import en_fr
from fusedseq.tasks.commands import grid
from fusedseq.tasks.training import TrainingError
from fusedseq.tasks.training.lock import locked, try_lock

from tests.support.study_runs import interrupted_at, table

TWO = ("grid-2-5-100-0.1", "grid-2-10-100-0.1")


@pytest.fixture(autouse=True)
def no_tensorboard(monkeypatch):
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)


def train_grid(out, *more):
    sets = [
        word
        for key in ("feedforward=16", "warmup_steps=2", "steps=3", "eval_steps=1")
        for word in ("--set", key)
    ]
    return cli.main(
        [
            "grid",
            "en-fr",
            "--data",
            "synthetic",
            "--ops",
            "reference",
            "--out",
            str(out),
            *sets,
            *more,
        ]
    )


def test_a_grid_writes_its_table_and_trains_nothing_twice(tmp_path, capsys):
    assert train_grid(tmp_path, "--only", TWO[0]) == 0
    results = [tmp_path / name / "result.json" for name in TWO]
    written = results[0].stat().st_mtime_ns
    assert train_grid(tmp_path, "--only", *TWO) == 0
    assert results[0].stat().st_mtime_ns == written
    rows = {row["name"]: row for row in table(tmp_path, "table")}
    assert [*rows] == [*en_fr.GRID]
    assert len(rows) == 16
    for name, result in zip(TWO, results, strict=True):
        metrics = json.loads(result.read_text())
        assert float(rows[name]["valid loss"]) == metrics["valid"]["loss"]
        assert rows[name]["model.heads"] == str(metrics["settings"]["model"]["heads"])
        assert 0 < float(rows[name]["train loss"]) < 20
        assert float(rows[name]["test bleu"]) == metrics["test"]["bleu"]
    assert rows["grid-3-5-300-0.3"]["document test bleu"] == "0.161"
    assert rows["grid-3-5-300-0.3"]["valid loss"] == ""
    assert (tmp_path / "table.md").read_text().count("\n| grid-") == 16
    for name in ("losses.png", "bleu.png"):
        assert (tmp_path / name).read_bytes().startswith(b"\x89PNG")
    text = capsys.readouterr().out
    assert f"{TWO[0]} is finished: nothing is left to do" in text
    assert "2 of 16 configurations are finished" in text


def test_an_interrupted_grid_continues(tmp_path, monkeypatch, capsys):
    with monkeypatch.context() as patch:
        interrupted_at(2, signal.SIGINT, patch)
        assert train_grid(tmp_path / "cut", "--only", *TWO) == 130
    assert not (tmp_path / "cut" / TWO[1]).exists()
    assert train_grid(tmp_path / "cut", "--only", TWO[0]) == 0
    assert ", step 2, into" in capsys.readouterr().out
    assert train_grid(tmp_path / "whole", "--only", TWO[0]) == 0
    cut, whole = (
        json.loads((tmp_path / run / TWO[0] / "result.json").read_text())
        for run in ("cut", "whole")
    )
    assert cut["valid"] == whole["valid"]


def test_more_steps_continue_a_finished_configuration(tmp_path, capsys):
    assert train_grid(tmp_path, "--only", TWO[0]) == 0
    assert train_grid(tmp_path, "--only", TWO[0], "--set", "steps=4") == 0
    assert ", step 3, into" in capsys.readouterr().out
    assert train_grid(tmp_path, "--only", TWO[0], "--set", "batch=4") == 2
    assert (
        "was started with data.batch 32, got 4: the settings of a run cannot change"
        in capsys.readouterr().err
    )


def test_a_finished_configuration_needs_no_checkpoint(tmp_path, capsys):
    assert train_grid(tmp_path, "--only", TWO[0]) == 0
    for path in (tmp_path / TWO[0]).glob("*.safetensors"):
        path.unlink()
    assert train_grid(tmp_path, "--only", TWO[0]) == 0
    assert "is finished: nothing is left to do" in capsys.readouterr().out
    assert train_grid(tmp_path, "--only", TWO[0], "--set", "steps=4") != 0
    assert (
        "has the result of a shorter run, and no last.safetensors to continue it from"
        in "".join(capsys.readouterr())
    )
    assert train_grid(tmp_path, "--only", TWO[0], "--set", "batch=4") == 2
    assert (
        "was started with data.batch 32, got 4: the settings of a run cannot change"
        in capsys.readouterr().err
    )


def test_a_finished_configuration_of_other_data_is_refused(tmp_path, capsys):
    """Data under another name are compared by their checksums."""
    assert train_grid(tmp_path, "--only", TWO[0]) == 0
    path = tmp_path / TWO[0] / "result.json"
    result = json.loads(path.read_text())
    result["data"]["name"] = "elsewhere"
    path.write_text(json.dumps(result))
    assert train_grid(tmp_path, "--only", TWO[0]) == 0
    result["data"]["fingerprint"] += 1
    path.write_text(json.dumps(result))
    capsys.readouterr()
    assert train_grid(tmp_path, "--only", TWO[0]) == 2
    assert "must be the data that the checkpoint was trained on" in capsys.readouterr().err


def test_a_configuration_locked_by_another_process_is_skipped(tmp_path, capsys):
    (tmp_path / TWO[0]).mkdir()
    with try_lock(tmp_path / TWO[0] / ".lock") as ours:
        assert ours
        assert train_grid(tmp_path, "--only", TWO[0]) == 0
    assert "another process is training it" in capsys.readouterr().out
    assert not (tmp_path / TWO[0] / "result.json").exists()


def test_a_full_disk_ends_the_grid(tmp_path, monkeypatch, capsys):
    tried = []

    def full(recipe, out):
        tried.append(recipe.preset)
        raise TrainingError("no space left") from OSError(28, "No space left on device")

    monkeypatch.setattr(grid, "carry_out", full)
    assert train_grid(tmp_path, "--only", *TWO) == 1
    assert tried == [TWO[0]]
    assert "no space left" in capsys.readouterr().err


def test_a_failing_configuration_does_not_end_the_grid(tmp_path, monkeypatch, capsys):
    carry_out = grid.carry_out

    def fails_once(recipe, out):
        if recipe.preset == TWO[0]:
            raise TrainingError("loss nan")
        return carry_out(recipe, out)

    monkeypatch.setattr(grid, "carry_out", fails_once)
    assert train_grid(tmp_path, "--only", *TWO) == 1
    assert f"fusedseq grid: {TWO[0]}: loss nan" in capsys.readouterr().err
    assert (tmp_path / TWO[1] / "result.json").exists()


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (
            ("--only", "grid-9"),
            "--only: unknown configuration 'grid-9'; known are grid-2-5-100-0.1,",
        ),
        (("--set", "heads=2"), "--set: the configurations differ in model.heads"),
        (("--set", "nothing=2"), "unknown key 'nothing'"),
    ],
)
def test_errors_of_grid_are_one_line(tmp_path, capsys, more, message):
    assert train_grid(tmp_path, *more) == 2
    assert message in capsys.readouterr().err


def test_a_task_without_a_grid_is_an_error(capsys):
    assert cli.main(["grid", "ptb"]) == 2
    assert (
        capsys.readouterr().err
        == "fusedseq grid: ptb has no documented table; tasks that have one: en-fr\n"
    )


def test_a_lock_has_one_holder(tmp_path):
    with locked(tmp_path / "lock"), try_lock(tmp_path / "lock") as ours:
        assert not ours
    with try_lock(tmp_path / "lock") as ours:
        assert ours
