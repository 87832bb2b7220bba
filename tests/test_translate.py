"""`fusedseq translate`, `generate` and the decoding of `fusedseq eval`, on a model that is trained for some seconds."""

import csv
import io
import json
import sys
from dataclasses import replace

import pytest
import torch
from fusedseq import cli, fused
from fusedseq.tasks import ptb, translate, translated
from fusedseq.tasks.catalog import task_module
from fusedseq.tasks.restored import restored
from fusedseq.tasks.search import Search, search_all
from fusedseq.tasks.training import Trainer, load_checkpoint, override, save_checkpoint

for package in ("nltk", "sacrebleu", "tokenizers"):
    pytest.importorskip(package)
SMALL = (
    "embedding=20",
    "heads=2",
    "layers=1",
    "feedforward=32",
    "dropout=0",
    "lr=.01",
    "warmup_steps=10",
    "data.max_length=16",
)
LINES = [
    "The dog sees the big house.",
    "",
    "They follow a red ship today.",
    "Some cats find 12 small cats.",
    "he opens it",
]


@pytest.fixture(scope="module")
def made():
    module = task_module("en-fr")
    settings = override(module.PRESETS["base"], [*SMALL, "steps=80", "epochs=none"])
    torch.manual_seed(0)
    return module.build(settings, "synthetic", ops=fused, seed=0), settings.training


@pytest.fixture(scope="module")
def run(made, tmp_path_factory):
    """The directory of a run of en-fr."""
    out = tmp_path_factory.mktemp("en-fr")
    trainer = Trainer(*made, out)
    trainer.fit()
    trainer.finish()
    made[0].model.eval()
    return out


@pytest.fixture(scope="module")
def language_model(tmp_path_factory):
    out = tmp_path_factory.mktemp("ptb")
    tiny = ["embedding=8", "hidden=8", "layers=1", "data.batch=40", "lr=5", "steps=3"]
    settings = override(ptb.PRESETS["lstm"], tiny)
    torch.manual_seed(0)
    trainer = Trainer(ptb.build(settings, "synthetic", ops=fused, seed=0), settings.training, out)
    trainer.fit()
    trainer.finish()
    return out


@pytest.fixture
def call(capsys):
    """What a command writes to its output; it must succeed."""

    def called(*words):
        capsys.readouterr()
        assert cli.main([*map(str, words)]) == 0
        return capsys.readouterr().out

    return called


@pytest.fixture
def refused(capsys):
    """What a command says that must not succeed."""

    def called(*words):
        capsys.readouterr()
        assert cli.main([*map(str, words)]) == 2
        return capsys.readouterr().err

    return called


@pytest.fixture
def text(tmp_path):
    path = tmp_path / "in.txt"
    path.write_text("\n".join(LINES))  # without a newline at the end
    return path


# --------------------------------------------------------------------------------------------------------- translate


def test_each_line_is_translated_in_its_place(run, call, text):
    """As each alone, whatever the batches; an empty one stays."""
    whole = call("translate", run, "--in", text).splitlines()
    assert len(whole) == len(LINES)
    for line, found in zip(LINES, whole, strict=True):
        text.write_text(line + "\n")
        assert call("translate", run, "--in", text) == found + "\n"
    assert whole[1] == ""
    assert all(whole[i] for i in (0, 2, 3, 4))
    assert len({*whole}) > 2


def test_the_translations_are_those_of_the_search(run, made, call, text):
    task = made[0]
    ids = [task.data.source.encode(task.data.source.tokenize(line)) for line in LINES if line]
    found = search_all(task.model, ids, 16, Search(beam=3, length_penalty=1.0))
    wanted = [" ".join(task.data.target.decode(h[0].ids)) for h in found]
    for ops in ("fused", "reference"):
        lines = call(
            "translate", run / "best.safetensors", "--in", text, "--beam", 3, "--length-penalty", 1, "--ops", ops
        )
        assert [line for line in lines.splitlines() if line] == wanted


def test_the_standard_input_is_read_in_chunks(run, call, text, monkeypatch):
    whole = call("translate", run, "--in", text)
    sizes = []
    monkeypatch.setattr(translate, "BATCHES", 1)
    monkeypatch.setattr(translate, "search_all", lambda m, s, *a: (sizes.append(len(s)), search_all(m, s, *a))[1])
    monkeypatch.setattr(sys, "stdin", io.StringIO(text.read_text()))
    assert call("translate", run, "--batch", 2) == whole
    assert sizes == [1, 2, 1]  # without the empty line


def test_only_newlines_end_a_line(run, call, text):
    text.write_bytes("the dog\r sees\u2028 the cat\r\nhe opens it\n".encode())
    assert len(call("translate", run, "--in", text).split("\n")) == 3


def test_n_best(run, call, text):
    best = call("translate", run, "--in", text, "--beam", 4).splitlines()
    rows = [line.split("\t") for line in call("translate", run, "--in", text, "--beam", 4, "--n-best", 3).splitlines()]
    assert {int(number) for number, _, _ in rows} == {1, 2, 3, 4, 5}
    for number, line in enumerate(best, 1):
        of = [(float(score), words) for n, score, words in rows if int(n) == number]
        assert of[0][1] == line
        assert of == sorted(of, key=lambda row: -row[0])
        assert len({words for _, words in of}) == len(of) == (3 if line else 1)


def test_a_translations_length_is_bounded(run, made, call, text):
    task = made[0]
    task_model = restored(run, ("en-fr",), ops="fused", device="cpu")[0]
    task_model.output_bias.data[3] -= 100  # END
    source = [task.data.source.encode(["the", "dog"]), task.data.source.encode(["the"] * 12)]
    found = search_all(task_model, source, 40, Search())
    assert [len(h[0].ids) for h in found] == [14, 34]
    found = search_all(task_model, source, 20, Search())
    assert [len(h[0].ids) for h in found] == [14, 18]  # of 20 ids START and END are two
    assert [len(h[0].ids) for h in search_all(task_model, source, 20, Search(max_length=5))] == [5, 5]
    assert all(len(line.split()) <= 2 for line in call("translate", run, "--in", text, "--max-length", 2).splitlines())


def test_no_more_words_than_there_are_learned_positions(made):
    model = made[0].model
    learned = task_module("en-fr").PRESETS["pe-learned"].model
    model = type(model)(20, 20, replace(learned, embedding=20, layers=1, max_length=9)).eval()
    assert len(search_all(model, [[2, 5, 3]], 9, Search(max_length=8))[0][0].ids) <= 8
    with pytest.raises(ValueError, match="max_length must be at most 8, as positions were learned, got 9"):
        search_all(model, [[2, 5, 3]], 9, Search(max_length=9))


def test_a_long_line_is_cut_and_told(run, call, capsys, text):
    text.write_text("he opens it\n" + "the " * 20 + "\n" + "the " * 14 + "\n")
    assert cli.main(["translate", str(run), "--in", str(text)]) == 0
    out, err = capsys.readouterr()
    assert out.splitlines()[1] == out.splitlines()[2]
    assert err == ("fusedseq translate: line 2 has 20 words, of which the first 14 are read: the model was trained on no "
                   "more\n")  # fmt: skip


def test_mistakes_of_translate_are_one_sentence(run, language_model, refused, text):
    assert "checkpoint nowhere does not exist" in refused("translate", "nowhere", "--in", text)
    assert "must hold a model of en-es or en-fr, got one of ptb" in refused("translate", language_model, "--in", text)
    assert "No such file" in refused("translate", run, "--in", text.with_name("none"))
    assert "beam must be at least 1, got 0" in refused("translate", run, "--in", text, "--beam", 0)
    assert "n_best must be from 1 to beam = 2, got 3" in refused(
        "translate", run, "--in", text, "--beam", 2, "--n-best", 3
    )
    assert "n_best must be at least 1, got 0" in refused("translate", run, "--in", text, "--n-best", 0)
    text.write_bytes(b"\xff\xfe\n")
    assert "is not readable text" in refused("translate", run, "--in", text)


# -------------------------------------------------------------------------------------------------------------- eval


def test_a_split_is_translated_and_judged(run, made, call, tmp_path):
    table, data = tmp_path / "test.csv", made[0].data
    ask = ("eval", "en-fr", run, "--data", "synthetic", "--splits", "test")
    out = call(*ask, "--beam", 2, "--csv", table, "--samples", 3)
    assert out.count("ours: ") == 3
    with table.open() as file:
        rows = list(csv.DictReader(file))
    assert [row["source"] for row in rows] == [" ".join(words) for words in data.test.source_words]
    assert [row["reference"] for row in rows] == [" ".join(words) for words in data.test.target_words]
    assert all(int(row["hypothesis_words"]) == len(row["hypothesis"].split()) for row in rows)
    figures = json.loads(call(*ask, "--beam", 2, "--json"))["test"]
    for name in ("bleu", "bleu_unsmoothed"):
        assert figures[name] == pytest.approx(sum(float(row[name]) for row in rows) / len(rows))
    assert figures["bleu"] > 0.02
    assert figures["beam"] == 2
    assert "tok:none" in figures["sacrebleu_signature"]
    assert f"sacrebleu {figures['sacrebleu']:.6g}" in out
    assert "accuracy" in figures
    assert "bleu" not in json.loads(call(*ask, "--json"))["test"]


def test_an_unknown_word_equals_the_unknown_word_in_the_documents_bleu_alone(made, monkeypatch):
    task = made[0]
    monkeypatch.setattr(translated, "search_all", lambda model, sources, *a: [
        [type("H", (), {"ids": ids[1:-1], "log_prob": -1.0})] for ids in task.data.valid.target
    ])  # fmt: skip
    words = [list(sentence) for sentence in task.data.valid.target_words]
    perfect, _ = translated.translate_split(task, "valid", Search())
    assert perfect["bleu"] == pytest.approx(1)
    assert perfect["sacrebleu"] == pytest.approx(100)
    for sentence in words:
        sentence[2] = "inconnu"
    pairs = task.data.valid._replace(target_words=words, target=[task.data.target.encode(s) for s in words])
    monkeypatch.setattr(task, "data", replace(task.data, valid=pairs))
    found, rows = translated.translate_split(task, "valid", Search())
    assert "inconnu" in rows[0].reference
    assert found["bleu"] == pytest.approx(1)
    assert found["sacrebleu"] < 70


def test_training_ends_with_the_bleu_of_greedy_translations(made, call, tmp_path):
    sets = [word for change in SMALL for word in ("--set", change)]
    out = call("train", "en-fr", "--data", "synthetic", "--steps", 2, "--out", tmp_path, *sets)
    figures = json.loads((tmp_path / "result.json").read_text())["test"]
    assert figures["beam"] == 1
    assert f"beam 1, bleu {figures['bleu']:.6g}" in out
    with (tmp_path / "test-greedy.csv").open() as file:
        assert len(list(csv.DictReader(file))) == len(made[0].data.test.text)


def test_a_missing_package_costs_the_bleu_alone(made, tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "sacrebleu.metrics", None)
    monkeypatch.setitem(sys.modules, "sacrebleu", None)
    assert made[0].more_figures("test", tmp_path) == {}
    assert "no BLEU: it needs the Python package sacrebleu" in capsys.readouterr().out


def test_a_table_is_whole_or_the_old_one(tmp_path):
    row = translated.Translation("a", "b", "c, d", 0.1, 0.0, 1, 1, 2, -3.0)
    path = tmp_path / "table.csv"
    translated.write_table(path, [row])
    with path.open() as file:
        assert next(csv.DictReader(file))["hypothesis"] == "c, d"
    with pytest.raises(csv.Error):
        translated.write_table(path, [row, None])
    assert [p.name for p in tmp_path.iterdir()] == ["table.csv"]
    assert "c, d" in path.read_text()


def test_options_that_do_not_fit_are_one_sentence(run, language_model, refused):
    def said(task, path, *options):
        return refused("eval", task, path, "--data", "synthetic", *options)

    assert "--csv is of one split, got --splits valid,test" in said("en-fr", run, "--csv", "x.csv")
    assert "--samples must be at least 1, got 0" in said("en-fr", run, "--samples", 0)
    assert "--beam is of en-es and en-fr, not of ptb" in said("ptb", language_model, "--beam", 2)
    assert "--temperature is of ptb, not of en-fr" in said("en-fr", run, "--temperature", "auto")
    assert "--dynamic needs --lr" in said("ptb", language_model, "--dynamic", "sgd")
    assert "--columns is of --dynamic, which is not given" in said("ptb", language_model, "--columns", 2)
    assert "--temperature must be above 0, got 0" in said("ptb", language_model, "--temperature", 0)


def test_perplexity_with_a_temperature_and_of_a_model_that_learns(language_model, call):
    ask = ("eval", "ptb", language_model, "--data", "synthetic", "--json", "--splits")
    figures = json.loads(call(*ask, "valid", "--temperature", "auto"))["valid"]
    assert figures["tempered_perplexity"] <= figures["perplexity"]
    assert 0.5 <= figures["temperature"] <= 2
    fixed = json.loads(call(*ask, "valid", "--temperature", figures["temperature"]))["valid"]
    assert fixed["tempered_loss"] == figures["tempered_loss"]
    dynamic = ("--dynamic", "sgd", "--lr", 1, "--decay", 0.001, "--segment", 20, "--columns", 10)
    figures = json.loads(call(*ask, "test", *dynamic))["test"]
    assert figures["dynamic_perplexity"] < figures["perplexity"]


# ---------------------------------------------------------------------------------------------------------- generate


def test_generated_text(language_model, call):
    first = call("generate", language_model, "--words", 40, "--samples", 2, "--seed", 4)
    assert first == call("generate", language_model, "--words", 40, "--samples", 2, "--seed", 4)
    assert first != call("generate", language_model, "--words", 40, "--samples", 2, "--seed", 5)
    assert "<eos>" not in first
    texts = first[:-1].split("\n\n")
    assert len(texts) >= 2
    greedy = [call("generate", language_model, "--words", 20, "--temperature", 0, "--seed", seed) for seed in (0, 1)]
    assert greedy[0] == greedy[1]
    assert greedy[0] == call("generate", language_model, "--words", 20, "--top-k", 1, "--ops", "reference")


def test_the_prompt_comes_first(language_model, call, capsys):
    word = restored(language_model, ("ptb",), ops="fused", device="cpu")[1]["vocabulary"][3]
    out = call("generate", language_model, "--prompt", f"{word} {word}", "--words", 10)
    assert out.startswith((f"{word} {word} ", f"{word} {word}\n"))
    assert call("generate", language_model, "--prompt", word, "--words", 0) == f"{word}\n"


@pytest.fixture
def knows_unknown(language_model):
    """A checkpoint whose seventh word is <unk>, and by far the likeliest."""
    path = language_model / "unknown.safetensors"
    state = load_checkpoint(language_model / "best.safetensors")
    state["description"]["vocabulary"][6] = "<unk>"
    state["model"]["decoder_bias"][6] += 20
    save_checkpoint(path, state)
    return path


def test_the_unknown_word_is_not_written_on_demand(knows_unknown, call):
    assert call("generate", knows_unknown, "--words", 9).split() == ["<unk>"] * 9
    assert "<unk>" not in call("generate", knows_unknown, "--words", 9, "--no-unknown")


def test_an_unknown_word_is_read_as_such(knows_unknown, language_model, call, refused, capsys):
    assert cli.main(["generate", str(knows_unknown), "--prompt", "the xyz", "--words", "1"]) == 0
    out, err = capsys.readouterr()
    assert out == "the xyz <unk>\n"
    assert err == "fusedseq generate: the model does not know 'xyz' and reads <unk>\n"
    message = refused("generate", language_model, "--prompt", "the xyz")
    assert "--prompt must be of words that the model knows, got 'xyz'" in message


def test_mistakes_of_generate_are_one_sentence(run, language_model, refused):
    assert "must hold a model of ptb, got one of en-fr" in refused("generate", run)
    assert "--samples must be at least 1, got 0" in refused("generate", language_model, "--samples", 0)
    assert "top_p must be in (0, 1], got 2.0" in refused("generate", language_model, "--top-p", 2)
