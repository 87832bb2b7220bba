"""bench.training: every task trains with every operator set, from the same weights on the same
batches.
"""

import json

import pytest
import torch
from fusedseq.tasks.catalog import TASKS, task_module

from bench.suite import baselines, chunked_loss, measurements
from bench.training import compare, speed
from bench.training.operator_sets import Run, prototype

SMALL = {
    "words": ["embedding=16", "heads=2", "feedforward=32", "batch=64"],
    "ptb": ["embedding=16", "hidden=16", "layers=2", "batch=20", "bptt=20"],
    "reverse": ["embedding=16", "heads=2", "feedforward=32", "layers=1"],
    "en-es": ["embedding=16", "heads=2", "layers=1", "feedforward=32", "batch=32"],
    "en-fr": ["embedding=20", "layers=1", "feedforward=32"],
}
PRESETS = dict.fromkeys(
    [
        *compare.PRESETS["speed"],
        "ptb/awd",
        "words/tied",
        "words/masked",
        "en-fr/pe-alibi",
        "en-fr/pe-relative",
    ]
)


def small_task(preset):
    task = preset.partition("/")[0]
    _, settings = compare.settings_of(preset, SMALL[task])
    return prototype(task, settings, "synthetic", 0, "cpu")


@pytest.mark.parametrize("preset", PRESETS)
def test_operator_sets_start_from_the_same_weights(preset):
    """The first losses agree; those of the baselines only roughly, because their random masks
    differ.
    """
    task = small_task(preset)
    runs = [Run(name, task, 0, batches=2) for name in ("fused", "reference", "baselines")]
    losses = [[run.step()[0].item() for run in runs] for _ in range(3)]
    assert losses[0][0] == pytest.approx(losses[0][1], rel=1e-5)
    assert losses[0][0] == pytest.approx(losses[0][2], rel=0.1)
    assert losses[1][0] != losses[0][0]


def test_a_limited_number_of_batches_is_repeated():
    run = Run("fused", small_task("en-fr/base"), 0, batches=2)
    first, second, third = (next(run.batches).source for _ in range(3))
    assert torch.equal(first, third)
    assert first.shape != second.shape or not torch.equal(first, second)


def test_runs_share_the_data_but_no_parameters():
    task = small_task("reverse/base")
    before = {name: p.clone() for name, p in task.model.state_dict().items()}
    one, other = Run("fused", task, 0), Run("baselines", task, 0)
    one.step()
    assert one.task.data is other.task.data
    for model in (task.model, other.task.model):
        assert all(torch.equal(before[name], p) for name, p in model.state_dict().items())


def test_speed_is_reported_and_judged(tmp_path, capsys):
    sets = [word for change in SMALL["reverse"] for word in ("--set", change)]
    options = [
        "--steps",
        "3",
        "--seconds",
        "0",
        "--ops",
        "fused",
        "baselines",
        "--out",
        str(tmp_path / "a.json"),
    ]
    assert compare.main(["speed", "reverse/base", "--data", "synthetic", *sets, *options]) == 0
    result = json.loads((tmp_path / "a.json").read_text())
    assert result["mkl"] == "as-installed"
    entry = result["rows"]["reverse/base"]
    assert len(entry["step seconds"]["fused"]) == len(entry["step seconds"]["baselines"]) == 3
    ((target, against, met),) = entry["bars"]
    assert (target, against, met) == (2.0, "baselines", entry["ratio"]["fused / baselines"] >= 2)
    assert entry["vocabulary"] == 10
    assert ("MISSED", "met")[met] in capsys.readouterr().out
    assert compare.main(["table", "--out", str(tmp_path / "a.json")]) == 0
    head, _, line = capsys.readouterr().out.splitlines()
    assert head.count("|") == line.count("|") == 7
    assert f"{entry['ratio']['fused / baselines']:.2f}" in line
    assert compare.main(["speed", "ptb/nothing"]) == 2
    assert "unknown preset 'ptb/nothing'; known are words/base" in capsys.readouterr().err


def test_agreement_is_measured(tmp_path):
    sets = [word for change in SMALL["ptb"] for word in ("--set", change)]
    options = ["--steps", "16", "--yardstick", "--out", str(tmp_path / "a.json")]
    assert compare.main(["agree", "ptb/awd", "--data", "synthetic", *sets, *options]) == 0
    entry = json.loads((tmp_path / "a.json").read_text())["rows"]["ptb/awd"]
    assert entry["ops"] == ["fused", "reference"]
    assert 0 < entry["largest difference"] < 1e-3
    assert entry["yardstick"] > 0


def test_targets_are_of_tasks_or_presets():
    known = {f"{task}/{preset}" for task in TASKS for preset in task_module(task).PRESETS} | {
        *TASKS
    }
    assert {*speed.TARGETS} <= known
    assert not speed.verdicts("ptb/lstm", {"ratio": {"fused / baselines": 3.0}})


@pytest.mark.skipif(
    not hasattr(torch.nn, "LinearCrossEntropyOptions"), reason="torch 2.13 has the operator"
)
@pytest.mark.parametrize(
    "options",
    [{}, {"ignore_index": 0, "label_smoothing": 0.1, "reduction": "sum"}, {"reduction": "none"}],
    ids=str,
)
def test_the_loss_in_chunks_is_the_other_baselines_loss(options):
    x, W, b = torch.randn(2, 30, 8), torch.randn(50, 8), torch.randn(50)
    target = torch.randint(50, (2, 30))
    losses = [
        ops.linear_cross_entropy(x, W, target, b, **options) for ops in (chunked_loss, baselines)
    ]
    torch.testing.assert_close(*losses)
    assert chunked_loss.linear is baselines.linear


def test_the_gain_of_a_step_is_over_the_faster_model():
    entry = {
        "ratio": {"fused / baselines": 1.5, "fused / chunked-loss": 1.1, "fused / compiled": 1}
    }
    assert measurements.step_speedup(entry) == 1.1
