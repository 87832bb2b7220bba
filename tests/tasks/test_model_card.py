"""The model card of a run, and its model loaded from the files."""

import json

import pytest
import torch
from fusedseq import cli
from fusedseq.tasks import load_model
from fusedseq.tasks.runs.model_card import model_card
from fusedseq.tasks.training import CheckpointError

SMALL = ("model.embedding=16", "model.hidden=16", "layers=1", "batch=20", "tied=true")


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    out = tmp_path_factory.mktemp("runs") / "small"
    sets = [word for change in SMALL for word in ("--set", change)]
    options = ["--data", "synthetic", "--steps", "3", "--out", str(out)]
    assert cli.main(["train", "ptb", "--preset", "lstm", *options, *sets]) == 0
    return out


def test_a_run_has_a_model_card(run):
    result = json.loads((run / "result.json").read_text())
    card = (run / "README.md").read_text()
    assert card == model_card(result)
    front, _, body = card.removeprefix("---\n").partition("\n---\n")
    metadata = {}
    for line in front.splitlines():  # JSON, which is YAML too
        key, _, value = line.partition(": ")
        metadata[key] = json.loads(value)
    assert metadata["pipeline_tag"] == "text-generation"
    of_test = metadata["model-index"][0]["results"][-1]
    assert of_test["dataset"] == {"name": "synthetic", "type": "synthetic", "split": "test"}
    assert {"type": "loss", "value": result["test"]["loss"]} in of_test["metrics"]
    for text in (result["command"], result["commit"], '"hidden": 16', "generated sentences"):
        assert text in body


def test_a_card_that_cannot_be_written_loses_no_result(run, capsys):
    (run / "result.json").unlink()
    (run / "README.md").unlink()
    (run / "README.md").mkdir()
    assert cli.main(["train", "ptb", "--data", "synthetic", "--resume", "--out", str(run)]) == 0
    assert "no model card: " in capsys.readouterr().out
    assert (run / "result.json").is_file()
    (run / "README.md").rmdir()


def test_a_readme_that_is_no_model_card_is_kept(run, capsys):
    (run / "README.md").write_text("# My project\n")
    assert cli.main(["train", "ptb", "--data", "synthetic", "--resume", "--out", str(run)]) == 0
    assert "README.md is another file, which is kept" in capsys.readouterr().out
    assert (run / "README.md").read_text() == "# My project\n"
    card = model_card(json.loads((run / "result.json").read_text()))
    (run / "README.md").write_text(card.replace("loss", "another loss"))
    assert cli.main(["train", "ptb", "--data", "synthetic", "--resume", "--out", str(run)]) == 0
    card = model_card(json.loads((run / "result.json").read_text()))
    assert (run / "README.md").read_text() == card


def test_the_model_of_a_run_is_loaded(run):
    model, description = load_model(run)
    again, _ = load_model(str(run / "best.safetensors"), ops="reference")
    assert not model.training
    assert description["task"] == "ptb"
    words = torch.tensor([[description["vocabulary"].index("<eos>")], [0]])
    logits, other = (m.logits(m(words)[0]) for m in (model, again))
    torch.testing.assert_close(logits, other)
    assert logits.shape[-1] == len(description["vocabulary"])
    with pytest.raises(CheckpointError, match="none does not exist"):
        load_model(run / "none")
    with pytest.raises(ValueError, match=r"ops must be one of fused, reference, .*, got 'foo'"):
        load_model(run, ops="foo")
    for device in ("foo", "meta"):
        with pytest.raises(ValueError, match=f"device must be cpu, cuda or cuda:N, got {device}"):
            load_model(run, device=device)


def of_data(run, task, name, fingerprint=1):
    """The front matter and the body of the card of a run that was trained on such data."""
    result = json.loads((run / "result.json").read_text())
    data = {"name": name, "fingerprint": fingerprint}
    return model_card(result | {"task": task, "data": data}).split("\n---\n")


def test_a_card_describes_the_documented_data(run):
    front, body = of_data(run, "en-fr", "ted_en_fr")
    assert '"dataset": {"name": "ted_en_fr"' in front
    assert "TED talks" in body
    assert "a small model of a small corpus" in body
    for name in ("data", "ptb"):  # the checksum says which data they are
        front, body = of_data(run, "ptb", name, 1330988314)
        assert '"dataset": {"name": "ptb"' in front
        assert "Wall Street Journal" in body


@pytest.mark.parametrize(
    ("task", "name"),
    [
        ("ptb", "ptb"),
        ("ptb", "wikitext2"),
        ("en-fr", "multi30k_en_fr"),
        ("en-es", "own"),
        ("words", "d"),
    ],
)
def test_a_card_states_nothing_about_other_data(run, task, name):
    front, body = of_data(run, task, name)
    assert "dataset" not in front
    assert '"ca"' not in front
    assert f'- Data: data in a directory named "{name}"' in body
    for claim in ("Penn Treebank", "Wall Street", "TED", "Tatoeba", "everyday", "small corpus"):
        assert claim not in body


def test_a_text_among_the_metrics_is_in_one_cell_and_not_in_the_metadata(run):
    result = json.loads((run / "result.json").read_text())
    result["test"] |= {"sacrebleu_signature": "nrefs:1|case:mixed"}
    front, _, body = model_card(result).partition("\n---\n")
    assert "| test | sacrebleu_signature | `nrefs:1\\|case:mixed` |" in body.splitlines()
    assert "nrefs" not in front


@pytest.mark.parametrize("dirty", [False, True])
def test_a_card_has_every_test_split_and_says_whether_sources_were_changed(run, dirty):
    result = json.loads((run / "result.json").read_text())
    card = model_card(result | {"news_test": {"loss": 1.5}, "dirty": dirty})
    assert "\n| news_test | loss | 1.5" in card
    assert '"split": "news_test"' in card
    assert (" and changes to it" in card) == dirty


def test_a_card_of_generated_data_claims_no_text(run):
    front, body = of_data(run, "ptb", "synthetic")
    assert "Wall Street" not in body
    assert '"dataset": {"name": "synthetic"' in front
    assert '"dataset": {"name": "generated"' in of_data(run, "reverse", "generated")[0]
