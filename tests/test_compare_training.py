"""bench.compare_training: every task trains with every operator set, from the same weights on the same batches."""

import json

import pytest
import torch
from fusedseq.tasks.catalog import TASKS, task_module

from bench import compare_training
from bench.training_sets import Run, prototype

SMALL = {
    "words": ["embedding=16", "heads=2", "feedforward=32", "batch=64"],
    "ptb": ["embedding=16", "hidden=16", "layers=2", "batch=20", "bptt=20"],
    "reverse": ["embedding=16", "heads=2", "feedforward=32", "layers=1"],
    "en-es": ["embedding=16", "heads=2", "layers=1", "feedforward=32", "batch=32"],
    "en-fr": ["embedding=20", "layers=1", "feedforward=32"],
}
ROWS = dict.fromkeys(
    [*compare_training.DEFAULT["speed"], "ptb/awd", "words/tied", "words/masked", "en-fr/pe-alibi", "en-fr/pe-relative"]
)


def made(row):
    task = row.partition("/")[0]
    _, settings = compare_training.chosen(row, SMALL[task])
    return prototype(task, settings, "synthetic", 0, "cpu")


@pytest.mark.parametrize("row", ROWS)
def test_operator_sets_begin_alike(row):
    """Losses before the first step: the same weights and batch, and masks that differ between fused and baselines alone."""
    task = made(row)
    runs = [Run(name, task, 0, batches=2) for name in ("fused", "reference", "baselines")]
    losses = [[run.step()[0].item() for run in runs] for _ in range(3)]
    assert losses[0][0] == pytest.approx(losses[0][1], rel=1e-5)
    assert losses[0][0] == pytest.approx(losses[0][2], rel=0.1)
    assert losses[1][0] != losses[0][0]


def test_a_few_batches_come_again_and_again():
    run = Run("fused", made("en-fr/base"), 0, batches=2)
    first, second, third = (next(run.batches).source for _ in range(3))
    assert torch.equal(first, third)
    assert first.shape != second.shape or not torch.equal(first, second)


def test_runs_share_data_and_nothing_that_learns():
    task = made("reverse/base")
    before = {name: p.clone() for name, p in task.model.state_dict().items()}
    one, other = Run("fused", task, 0), Run("baselines", task, 0)
    one.step()
    assert one.task.data is other.task.data
    for model in (task.model, other.task.model):
        assert all(torch.equal(before[name], p) for name, p in model.state_dict().items())


def test_speed_is_told_and_judged(tmp_path, capsys):
    sets = [word for change in SMALL["reverse"] for word in ("--set", change)]
    options = ["--steps", "3", "--seconds", "0", "--ops", "fused", "baselines", "--out", str(tmp_path / "a.json")]
    assert compare_training.main(["speed", "reverse/base", "--data", "synthetic", *sets, *options]) == 0
    row = json.loads((tmp_path / "a.json").read_text())["rows"]["reverse/base"]
    assert len(row["step seconds"]["fused"]) == len(row["step seconds"]["baselines"]) == 3
    ((bar, against, met),) = row["bars"]
    assert (bar, against, met) == (2.0, "baselines", row["ratio"]["fused / baselines"] >= 2)
    assert row["vocabulary"] == 10
    assert ("MISSED", "met")[met] in capsys.readouterr().out
    assert compare_training.main(["table", "--out", str(tmp_path / "a.json")]) == 0
    head, _, line = capsys.readouterr().out.splitlines()
    assert head.count("|") == line.count("|") == 7
    assert f"{row['ratio']['fused / baselines']:.2f}" in line
    assert compare_training.main(["speed", "ptb/nothing"]) == 2
    assert "unknown row 'ptb/nothing'; known are words/base" in capsys.readouterr().err


def test_agreement_is_measured(tmp_path):
    sets = [word for change in SMALL["ptb"] for word in ("--set", change)]
    options = ["--steps", "4", "--yardstick", "--out", str(tmp_path / "a.json")]
    assert compare_training.main(["agree", "ptb/awd", "--data", "synthetic", *sets, *options]) == 0
    row = json.loads((tmp_path / "a.json").read_text())["rows"]["ptb/awd"]
    assert row["ops"] == ["fused", "reference"]
    assert 0 < row["largest difference"] < 1e-3
    assert row["yardstick"] > 0


def test_bars_are_of_tasks_or_rows():
    known = {f"{task}/{preset}" for task in TASKS for preset in task_module(task).PRESETS} | {*TASKS}
    assert {*compare_training.BARS} <= known
    assert not compare_training.verdicts("ptb/lstm", {"ratio": {"fused / baselines": 3.0}})
