"""Ensembles of word predictors: the vote, the average, and the commands that make them."""

import argparse
import json
from collections import Counter

import pytest
import torch
from fusedseq import cli
from fusedseq.tasks.commands import ensemble as commands
from fusedseq.tasks.evaluation.ensemble import AVERAGE, VOTE, ensemble, majority

SETS = [
    w
    for change in ("embedding=16", "heads=2", "feedforward=16", "batch=200", "lr=.01")
    for w in ("--set", change)
]


@pytest.mark.parametrize("models", [1, 2, 3, 5, 6])
def test_the_vote_equals_collections_counter(models):
    votes = torch.randint(4, (models, 500), generator=torch.Generator().manual_seed(models))
    found = majority(votes)
    assert found.tolist() == [Counter(column).most_common(1)[0][0] for column in votes.T.tolist()]


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Three trained members with different seeds and widths."""
    folder = tmp_path_factory.mktemp("runs")
    for seed, width in enumerate(("16", "8", "16")):
        assert (
            cli.main(
                [
                    "train",
                    "words",
                    "--data",
                    "synthetic",
                    "--steps",
                    "30",
                    "--seed",
                    str(seed),
                    "--skip-test",
                    "--out",
                    str(folder / f"m{seed}"),
                    *SETS,
                    "--set",
                    f"embedding={width}",
                ]
            )
            == 0
        )
    return [folder / f"m{seed}" for seed in range(3)]


@pytest.mark.parametrize("ops", ["fused", "reference"])
def test_the_average_is_the_geometric_mean_of_the_members(runs, ops):
    found = ensemble(runs, "synthetic", ops=ops, device="cpu")
    found.model.eval()
    metrics = found.evaluate("news_test")
    loss, right, votes, n = 0.0, 0, 0, 0
    with torch.no_grad():
        for batch in found.batches("news_test"):
            log_p = torch.stack(
                [m.logits(m(batch.context)).double().log_softmax(-1) for m in found.model]
            )
            mean = log_p.mean(0).log_softmax(-1)  # a geometric mean is not normalized
            known = batch.target != 1
            loss -= mean.gather(1, batch.target[:, None]).sum().item()
            right += ((mean.argmax(-1) == batch.target) & known).sum().item()
            voted = [Counter(column).most_common(1)[0][0] for column in log_p.argmax(-1).T.tolist()]
            votes += ((torch.tensor(voted) == batch.target) & known).sum().item()
            n += batch.items
    assert metrics[AVERAGE] == pytest.approx(
        {"loss": loss / n, "accuracy": right / n, "contexts": n}, rel=1e-5
    )
    assert metrics[VOTE] == pytest.approx({"accuracy": votes / n, "contexts": n})
    assert right != votes


def test_a_member_has_the_metrics_it_has_alone(runs, capsys):
    capsys.readouterr()
    options = ["--data", "synthetic", "--splits", "test,news_test", "--json"]
    assert cli.main(["eval", "words", *map(str, runs), *options]) == 0
    together = json.loads(capsys.readouterr().out)
    for i, path in enumerate(runs):
        assert cli.main(["eval", "words", str(path), *options]) == 0
        alone = json.loads(capsys.readouterr().out)
        assert {split: part["members"][i] for split, part in together.items()} == {
            split: pytest.approx(part) for split, part in alone.items()
        }


def test_three_copies_of_a_model_equal_the_model(runs):
    found = ensemble([runs[0]] * 3, "synthetic", ops="fused", device="cpu")
    found.model.eval()
    metrics = found.evaluate("valid")
    (own,) = {json.dumps(member) for member in metrics["members"]}
    assert metrics[AVERAGE] == pytest.approx(json.loads(own), rel=1e-5)
    assert metrics[VOTE]["accuracy"] == json.loads(own)["accuracy"]


def test_lines_name_each_model(runs, capsys):
    assert (
        cli.main(["eval", "words", *map(str, runs[:2]), "--data", "synthetic", "--splits", "valid"])
        == 0
    )
    shown = capsys.readouterr().out.splitlines()
    assert [line.split(": ")[0] for line in shown] == [
        f"valid, {name}" for name in (*runs[:2], VOTE, AVERAGE)
    ]


@pytest.mark.parametrize(
    ("more", "what"), [(["--set", "vocabulary=50"], "vocabulary"), (["--set", "context=4"], "data")]
)
def test_members_with_other_data_are_an_error(runs, tmp_path, capsys, more, what):
    other = str(tmp_path / "other")
    assert (
        cli.main(
            [
                "train",
                "words",
                "--data",
                "synthetic",
                "--steps",
                "1",
                "--out",
                other,
                "--skip-test",
                *SETS,
                *more,
            ]
        )
        == 0
    )
    assert cli.main(["eval", "words", str(runs[0]), other, "--data", "synthetic"]) == 2
    assert f"must have the {what} of" in capsys.readouterr().err


def test_ensembles_require_the_task_words(runs, capsys):
    assert cli.main(["eval", "reverse", *map(str, runs)]) == 2
    assert (
        "several checkpoints form an ensemble, which requires the task words, got reverse"
        in capsys.readouterr().err
    )
    assert (
        cli.main(["eval", "words", *map(str, runs), "--data", "synthetic", "--splits", "nowhere"])
        == 2
    )
    assert "unknown split 'nowhere'; known are train, valid" in capsys.readouterr().err


def test_an_unknown_split_is_reported_before_the_training(tmp_path, capsys):
    out = tmp_path / "ensemble"
    words = ["--data", "synthetic", "--steps", "1", "--out", str(out), "--splits", "valid,foo"]
    assert cli.main(["ensemble", "words", *words, *SETS]) == 2
    assert "unknown split 'foo'; known are train, valid" in capsys.readouterr().err
    assert not out.exists()


def test_the_command_in_the_result_has_every_option_that_was_given():
    parser = argparse.ArgumentParser()
    commands.add_arguments(parser)
    args = parser.parse_args(
        ["words", "--members", "base", "--steps", "0", "--ops", "reference", "--set", "lr=1"]
    )
    member = {"command": "fusedseq train words", "seconds": 1.0, "parameters": 2}
    assert commands.result(args, [member], {})["command"] == (
        "fusedseq ensemble words --members base --steps 0 --ops reference --set lr=1"
    )


def test_one_command_trains_evaluates_and_continues_an_ensemble(tmp_path, capsys):
    def command(members, steps, *more):
        code = cli.main(
            [
                "ensemble",
                "words",
                "--members",
                members,
                "--data",
                "synthetic",
                "--steps",
                str(steps),
                "--seed",
                "4",
                "--out",
                str(tmp_path),
                *SETS,
                *more,
            ]
        )
        return code, capsys.readouterr()

    code, shown = command("base,layers-2", 3)
    assert code == 0
    assert f"news_test, {VOTE}: accuracy" in shown.out
    result = json.loads((tmp_path / "result.json").read_text())
    members = [
        json.loads((tmp_path / name / "result.json").read_text())
        for name in ("1-base", "2-layers-2")
    ]
    assert [member["seed"] for member in members] == [4, 5]
    assert result["parameters"] == sum(member["parameters"] for member in members)
    assert result["members"][1]["test"] == pytest.approx(members[1]["test"])
    assert result["preset"] == "ensemble"
    assert result["command"].startswith(
        "fusedseq ensemble words --members base,layers-2 --seed 4 --steps 3 --set embedding=16"
    )
    assert " --ops " not in result["command"]
    files = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("last.safetensors")}
    assert command("base,layers-2", 3, "--splits", "valid")[0] == 0
    of_valid = json.loads((tmp_path / "result.json").read_text())
    assert of_valid["valid"] == result["valid"]
    assert not {"test", "news_test"} & of_valid.keys()
    code, shown = command("base,layers-2,base", 3)  # finished members are not trained again
    assert code == 0
    assert {path: path.stat().st_mtime_ns for path in files} == files
    assert len(json.loads((tmp_path / "result.json").read_text())["members"]) == 3
    assert command("base,layers-2", 5)[0] == 0
    assert json.loads((tmp_path / "1-base/result.json").read_text())["steps"] == 5
    code, shown = command("base,nothing", 5)
    assert code == 2
    assert "words: unknown preset 'nothing'; known are base" in shown.err
