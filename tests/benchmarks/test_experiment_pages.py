"""bench.experiments: recorded results are complete and without paths, and the pages show them."""

import json
import re
from argparse import Namespace

import pytest
from fusedseq import cli
from fusedseq.tasks.experiments import results as package_results
from fusedseq.tasks.experiments.documented import EXPERIMENTS

from bench.experiments import __main__ as program
from bench.experiments import groups, pages, record, results, task_pages

SMALL_MODEL = ("model.embedding=16", "model.hidden=16", "layers=1", "batch=20", "tied=true")


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """The directory of a finished run of a small ptb/lstm."""
    out = tmp_path_factory.mktemp("runs") / "small"
    sets = [word for change in SMALL_MODEL for word in ("--set", change)]
    options = ["--data", "synthetic", "--epochs", "3", "--seed", "3", "--ops", "reference"]
    command = ["train", "ptb", "--preset", "lstm", *options, "--out", str(out), *sets]
    assert cli.main(command) == 0
    return out


def test_a_run_is_recorded_and_shown(run, tmp_path, capsys):
    root = tmp_path / "repository"
    (root / "docs").mkdir(parents=True)
    folder = root / results.FOLDER
    note = f"cut short in {run}/"
    options = ("--label", "small", "--note", note, "--results", str(folder))
    assert program.main(["add", str(run), *options]) == 0
    (path,) = folder.iterdir()
    assert path.name == "ptb-lstm-small.json"
    assert str(run.parent) not in path.read_text()
    assert program.main(["pages", "--root", str(root)]) == 0
    lines = (root / "docs/results/ptb.md").read_text().splitlines()
    line = " ".join(line for line in lines if line.startswith("| ptb/lstm"))
    result = json.loads(path.read_text())
    assert "132.29" in (root / "docs/results.md").read_text()
    for text in (
        "ptb/lstm (small)",
        "132.29",
        f"{result['test']['perplexity']:.2f}",
        "3 of 50 epochs",
        "model.hidden 16",
        f"`{result['command']} --data DATA`",
        "cut short in",
    ):
        assert text in line, text
    if "not installed" not in capsys.readouterr().out:
        curves = root / "docs/assets/curves-ptb.png"
        assert curves.read_bytes().startswith(b"\x89PNG")
    assert program.main(["add", str(run), "--experiment", "ptb/none", *options]) == 2
    assert "no such experiment: ptb/none" in capsys.readouterr().err


def test_a_result_without_a_command_is_completed(run, tmp_path):
    """Early runs did not record their command and machine."""
    result = json.loads((run / "result.json").read_text())
    later = ("command", "changes", "data", "machine", "versions", "commit", "dirty", "date")
    early = {key: value for key, value in result.items() if key not in later}
    args = Namespace(experiment=None, label=None, note=None, data="ptb")
    completed = record.completed(early, args)
    assert completed["command"] == result["command"]
    assert completed["machine"] == result["machine"]
    assert completed["data"] == {"name": "ptb"}


def test_metrics_of_a_later_evaluation_are_added(run, tmp_path):
    evaluation = {"test": {"temperature": 0.9}, "valid": {"loss": 1.5}}
    (tmp_path / "a.json").write_text(json.dumps(evaluation))
    options = "--eval", str(tmp_path / "a.json"), "--results", str(tmp_path)
    assert program.main(["add", str(run), *options]) == 0
    result, before = (
        json.loads(path.read_text()) for path in (tmp_path / "ptb-lstm.json", run / "result.json")
    )
    assert result["test"] == before["test"] | {"temperature": 0.9}
    assert result["valid"]["loss"] == 1.5
    assert result["command"] == before["command"]
    beam = record.with_evaluation(result | {"row": "en-es/beam"}, {})
    assert beam["command"].endswith(EXPERIMENTS["en-es/beam"].command)


@pytest.mark.parametrize(
    ("text", "left"),
    [
        ("/home/a/data/ptb", "ptb"),
        ("~/x.bin and ../y/z", "x.bin and z"),
        ("--data /data", "--data data"),
        ("en-es/base at 3 tokens/s, 1/4", "en-es/base at 3 tokens/s, 1/4"),
    ],
)
def test_directories_are_removed(text, left):
    assert record.without_paths({"a": [text, 3]}) == {"a": [left, 3]}


def test_a_smoke_run_shows_no_accuracy():
    """A run without a whole epoch is on the page of smoke runs, with its loss and nothing else."""
    committed = results.committed()
    found = [result for several in committed.values() for result in several]
    smoke = [result for result in found if results.is_smoke_run(result)]
    assert 0 < len(smoke) < len(found)
    written = pages.of_results(committed)
    page = written.pop("smoke_runs.md")
    reproductions = "".join(written.values())
    for result in found:
        command = f"`{task_pages.command(result)}`"
        assert (command in page) == results.is_smoke_run(result)
        assert (command in reproductions) != results.is_smoke_run(result)
    tables = [line for line in page.splitlines() if line.startswith("|")]
    assert not any("accuracy" in line or "bleu" in line.lower() for line in tables)


def test_a_budget_is_in_full_only_without_changes():
    training = {"epochs": 20, "steps": None}
    result = {"task": "reverse", "preset": "base", "steps": 2500, "changes": {}}
    result |= {"settings": {"training": training}, "validations": []}
    assert task_pages.budget(result | {"epochs": 20}) == "20 epochs (2,500 steps), in full"
    assert task_pages.budget(result | {"epochs": 5}) == "5 of 20 epochs (2,500 steps)"
    assert task_pages.budget(result | {"epochs": 60}) == "60 epochs instead of 20 (2,500 steps)"
    changed = result | {"epochs": 20, "changes": {"model.scale": "head"}}
    assert task_pages.budget(changed) == "20 epochs (2,500 steps)"
    # The steps after the last epoch's validation have no part in the weights.
    stopped = result | {"epochs": 5, "validations": [{"epoch": 5, "step": 2400}]}
    assert task_pages.budget(stopped) == "5 of 20 epochs (2,400 steps)"
    seldom = result | {"epochs": 20, "validations": [{"epoch": 18, "step": 2250}]}
    assert task_pages.budget(seldom) == "20 epochs (2,500 steps), in full"


def test_the_committed_pages_are_up_to_date():
    """If this fails: python -m bench.experiments pages"""
    committed = results.committed()
    for name, text in pages.of_results(committed).items():
        assert (results.ROOT / "docs" / name).read_text() == text, name
    carried = (results.ROOT / results.CARRIED).read_text(encoding="utf-8")
    assert carried == package_results.packed(committed)


def test_no_page_has_a_path_of_a_machine():
    for name, text in pages.of_results(results.committed()).items():
        for page in ("assets/", "smoke_runs.md", "results.md"):
            text = text.replace(f"(../{page}", "(")
        assert not re.search(r"/(home|work|tmp|root)/|\.\./|--data (?!DATA\b)", text), name


def test_runs_of_several_seeds_are_one_line():
    experiment = EXPERIMENTS["reverse/base"]
    runs = [
        {
            "row": "reverse/base",
            "label": f"wide-seed-{seed}",
            "seed": seed,
            "changes": {"model.heads": 4},
            "epochs": 20,
            "ops": "fused",
            "validations": [],
            "test": {"loss": loss, "token_accuracy": accuracy},
        }
        for seed, loss, accuracy in ((0, 0.5, 0.6), (1, 0.7, 0.64))
    ]
    other = runs[0] | {"label": "wide-seed-0-again"}
    (group, alone) = groups.of_experiment([*runs, other])
    assert (group, alone) == (runs, [other])
    assert groups.name_of(experiment, group) == "reverse/base (wide, 2 seeds)"
    assert groups.name_of(experiment, alone) == "reverse/base (wide-seed-0-again)"
    assert groups.measured(experiment, group) == [
        "test loss 0.6 ± 0.14",
        "test token_accuracy 62 % ± 2.8 points",
    ]


def test_encodings_are_in_order_of_the_last_loss_that_all_have():
    base = results.committed()["en-fr/base"][0]
    found = []
    for positions, losses in (("rope", [5.0, 3.5, 1.0]), ("none", [4.0, 2.25])):
        curve = [{"epoch": i, "valid_loss": loss} for i, loss in enumerate(losses, 1)]
        run = {"preset": f"pe-{positions}", "validations": curve, "epochs": len(losses)}
        run |= {"label": "", "settings": {"model": {"positions": positions}}}
        found.append((None, [base | run | {"test": {"bleu": 0.125}}]))
    title, table = task_pages.encodings(found)
    assert "after epoch 2," in title
    assert table.splitlines()[2:] == [
        "| none | 4.000 | 2.250 |  | 0.125 | 2 epochs |",
        "| rope | 5.000 | 3.500 | 1.000 | 0.125 | 3 epochs |",
    ]
    assert task_pages.encodings(found[:1]) == []
    labelled = [(None, [group[0] | {"label": "small"}]) for _, group in found]
    assert task_pages.encodings(labelled) == []


def test_samples_come_from_the_table_of_translations(tmp_path):
    lines = [f"s{i},r{i},{'a/b' if i == 0 else i},1" for i in range(17)]
    table = tmp_path / "test.csv"
    table.write_text("\n".join(["source,reference,hypothesis,bleu", *lines]) + "\n")
    samples = record.of_table(table)
    assert samples == [
        {"source": f"s{i}", "reference": f"r{i}", "hypothesis": str(i)} for i in range(1, 17, 2)
    ]
    assert record.of_table(tmp_path / "none.csv") == []
    result = results.committed()["en-fr/base"][0] | {"samples": samples}
    page = task_pages.page({"en-fr/base": [result]}, "en-fr")
    assert "| s1 | r1 | 1 |" in page
    assert task_pages.escaped("a `b` | <UNK> & *c*") == r"a \`b\` \| &lt;UNK&gt; &amp; \*c\*"


@pytest.mark.parametrize(
    "path", sorted((results.ROOT / results.FOLDER).glob("*.json")), ids=lambda path: path.stem
)
def test_a_recorded_result_is_complete_and_has_no_path(path):
    text = path.read_text()
    result = json.loads(text)
    assert result["row"] in EXPERIMENTS
    assert record.without_paths(result) == result
    assert not re.search(r'"/|/(home|work|tmp|root)/', text)
    assert {"machine", "versions", "date", "seconds", "command"} <= {*result}
