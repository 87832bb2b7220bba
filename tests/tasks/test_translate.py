"""`fusedseq translate`, `generate` and the decoding of `fusedseq eval`, on a small model."""

import csv
import io
import json
import math
import sys
from dataclasses import replace

import pytest
import torch
from fusedseq import cli, fused
from fusedseq.tasks import ptb
from fusedseq.tasks.catalog import task_module
from fusedseq.tasks.commands import translate
from fusedseq.tasks.commands.arguments import named_options
from fusedseq.tasks.runs.restore import restored
from fusedseq.tasks.training import Trainer, as_dict, load_checkpoint, override, save_checkpoint
from fusedseq.tasks.training.independent_batches import IndependentBatches
from fusedseq.tasks.translation import scoring, search
from fusedseq.tasks.translation.search import Search, search_all

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
    task = module.build(settings, "synthetic", ops=fused, seed=0)
    task.model.eval()
    return task, settings.training


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
    """Runs a command, which must succeed; returns its output."""

    def called(*words):
        capsys.readouterr()
        assert cli.main([*map(str, words)]) == 0
        return capsys.readouterr().out

    return called


@pytest.fixture
def error_of(capsys):
    """Runs a command, which must fail with exit code 2; returns its error message."""

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


# translate.


def test_translations_are_in_the_order_of_the_lines(run, call, text):
    """Each equals that of the line alone; an empty line stays empty."""
    whole = call("translate", run, "--in", text).splitlines()
    assert len(whole) == len(LINES)
    for line, found in zip(LINES, whole, strict=True):
        text.write_text(line + "\n")
        assert call("translate", run, "--in", text) == found + "\n"
    assert whole[1] == ""
    assert all(whole[i] for i in (0, 2, 3, 4))
    assert len({*whole}) > 2


def test_translations_equal_those_of_search_all(run, made, call, text):
    task = made[0]
    ids = [task.data.source.encode(task.data.source.tokenize(line)) for line in LINES if line]
    found = search_all(task.model, ids, 16, Search(beam=3, length_penalty=1.0))
    wanted = [" ".join(task.data.target.decode(h[0].ids)) for h in found]
    for ops in ("fused", "reference"):
        lines = call(
            "translate",
            run / "best.safetensors",
            "--in",
            text,
            "--beam",
            3,
            "--length-penalty",
            1,
            "--ops",
            ops,
        )
        assert [line for line in lines.splitlines() if line] == wanted


def test_the_standard_input_is_read_in_chunks(run, call, text, monkeypatch):
    whole = call("translate", run, "--in", text)
    sizes = []
    monkeypatch.setattr(translate, "BATCHES", 1)
    monkeypatch.setattr(
        translate, "search_all", lambda m, s, *a: (sizes.append(len(s)), search_all(m, s, *a))[1]
    )
    monkeypatch.setattr(sys, "stdin", io.StringIO(text.read_text()))
    assert call("translate", run, "--batch", 2) == whole
    assert sizes == [1, 2, 1]  # without the empty line


def test_only_newlines_end_a_line(run, call, text):
    text.write_bytes("the dog\r sees\u2028 the cat\r\nhe opens it\n".encode())
    assert len(call("translate", run, "--in", text).split("\n")) == 3


def test_n_best(run, call, text):
    best = call("translate", run, "--in", text, "--beam", 4).splitlines()
    rows = [
        line.split("\t")
        for line in call("translate", run, "--in", text, "--beam", 4, "--n-best", 3).splitlines()
    ]
    assert {int(number) for number, _, _ in rows} == {1, 2, 3, 4, 5}
    for number, line in enumerate(best, 1):
        of = [(float(score), words) for n, score, words in rows if int(n) == number]
        assert of[0][1] == line
        assert of == sorted(of, key=lambda row: -row[0])
        assert len({words for _, words in of}) == len(of) == (3 if line else 1)


def test_the_length_of_a_translation_is_limited(run, made, call, text):
    task = made[0]
    task_model = restored(run, ("en-fr",), ops="fused", device="cpu")[0]
    task_model.output_bias.data[3] -= 100  # END
    source = [task.data.source.encode(["the", "dog"]), task.data.source.encode(["the"] * 12)]
    found = search_all(task_model, source, 40, Search())
    assert [len(h[0].ids) for h in found] == [14, 34]
    found = search_all(task_model, source, 20, Search())
    assert [len(h[0].ids) for h in found] == [14, 18]  # 20 ids include START and END
    assert [len(h[0].ids) for h in search_all(task_model, source, 20, Search(max_length=5))] == [
        5,
        5,
    ]
    assert all(
        len(line.split()) <= 2
        for line in call("translate", run, "--in", text, "--max-length", 2).splitlines()
    )


def test_learned_positions_limit_the_length(made):
    model = made[0].model
    learned = task_module("en-fr").PRESETS["pe-learned"].model
    model = type(model)(20, 20, replace(learned, embedding=20, layers=1, max_length=9)).eval()
    assert len(search_all(model, [[2, 5, 3]], 9, Search(max_length=8))[0][0].ids) <= 8
    with pytest.raises(
        ValueError, match="max_length must be at most 8, because the positions are learned, got 9"
    ):
        search_all(model, [[2, 5, 3]], 9, Search(max_length=9))


def test_learned_positions_are_enough_for_every_sentence(made, error_of, tmp_path):
    sets = [word for change in SMALL for word in ("--set", change)]
    sets += ["--set", "positions=learned", "--set", "model.max_length=15"]
    out = tmp_path / "run"
    assert (
        "data.max_length must be at most model.max_length = 15, because the positions are learned, "
        "got 16"
    ) in error_of("train", "en-fr", "--data", "synthetic", "--out", out, *sets)
    assert not out.exists()


def test_a_checkpoint_with_fewer_learned_positions_translates(made, capsys):
    """Such a one could be trained before the settings were compared."""
    changes = [*SMALL, "positions=learned", "model.max_length=9"]
    settings = override(task_module("en-fr").PRESETS["base"], changes)
    words = made[0].words()
    model = type(made[0].model)(*(len(words[side]) for side in words), settings.model).eval()
    model.output_bias.data[3] -= 100  # END
    description = {"task": "en-fr", "settings": as_dict(settings), "vocabulary": words}
    (((_, text),),) = translate.Lines(model, description, Search())(["the " * 30], 1)
    assert len(text.split()) == 7
    assert "has 30 words, of which only the first 7 are translated" in capsys.readouterr().err


def test_a_long_line_is_cut_with_a_warning(run, call, capsys, text):
    text.write_text("he opens it\n" + "the " * 20 + "\n" + "the " * 14 + "\n")
    assert cli.main(["translate", str(run), "--in", str(text)]) == 0
    out, err = capsys.readouterr()
    assert out.splitlines()[1] == out.splitlines()[2]
    assert err == (
        "fusedseq translate: line 2 has 20 words, of which only the first 14 are translated: "
        "the model was trained on no longer sentences\n"
        "fusedseq translate: 1 of 31 words are not in the vocabulary\n"
    )


def test_errors_of_translate_are_one_line(run, language_model, error_of, text):
    assert "checkpoint nowhere does not exist" in error_of("translate", "nowhere", "--in", text)
    assert "must hold a model of en-es or en-fr, got one of ptb" in error_of(
        "translate", language_model, "--in", text
    )
    assert "--in: /no/file: No such file" in error_of("translate", run, "--in", "/no/file")
    text.write_bytes(b"\xff\xfe\n")
    assert "in.txt, line 1: byte 1 is not UTF-8" in error_of("translate", run, "--in", text)


@pytest.mark.parametrize(
    ("command", "options", "message"),
    [
        ("translate", "--beam 0", "--beam must be at least 1, got 0"),
        ("translate", "--beam 2 --n-best 3", "--n-best must be from 1 to --beam = 2, got 3"),
        ("translate", "--n-best 0", "--n-best must be at least 1, got 0"),
        ("translate", "--max-length 0", "--max-length must be at least 1, got 0"),
        (
            "translate",
            f"--max-length {10**20}",
            "--max-length must be at most 10,000,000, got 100,",
        ),
        ("eval ptb", "--dynamic sgd --lr inf", "--lr must be finite, got inf"),
        ("translate", "--length-penalty -1", "--length-penalty must be at least 0, got -1.0"),
        ("generate", "--words -1", "--words must be at least 0, got -1"),
        ("generate", "--temperature -1", "--temperature must be at least 0, got -1.0"),
        ("generate", "--top-k 0", "--top-k must be at least 1, got 0"),
        ("generate", "--top-p 2", "--top-p must be in (0, 1], got 2.0"),
        ("eval en-fr", "--beam 0", "--beam must be at least 1, got 0"),
        ("eval en-fr", "--length-penalty -1", "--length-penalty must be at least 0, got -1.0"),
        ("eval ptb", "--dynamic sgd --lr -1", "--lr must be at least 0, got -1.0"),
        ("eval ptb", "--dynamic sgd --lr 1 --columns 0", "--columns must be at least 1, got 0"),
    ],
)
def test_an_option_out_of_range_is_named(
    run, language_model, error_of, text, command, options, message
):
    path = language_model if command in ("generate", "eval ptb") else run
    more = {"translate": ["--in", text], "generate": []}.get(command, ["--data", "synthetic"])
    error = error_of(*command.split(), path, *more, *options.split())
    assert error.startswith(f"fusedseq {command.split()[0]}: {message}")


def test_a_message_about_something_else_is_not_changed():
    for message in ("data.words must be 3", "words are missing", "Model: words must be 3"):
        with pytest.raises(ValueError, match=f"^{message}$"), named_options(["words"]):
            raise ValueError(message)


# eval.


def test_a_split_is_translated_and_scored(run, made, call, tmp_path):
    table, data = tmp_path / "test.csv", made[0].data
    ask = ("eval", "en-fr", run, "--data", "synthetic", "--splits", "test")
    out = call(*ask, "--beam", 2, "--csv", table, "--samples", 3)
    assert out.count("ours: ") == 3
    with table.open() as file:
        rows = list(csv.DictReader(file))
    assert [row["source"] for row in rows] == [" ".join(words) for words in data.test.source_words]
    assert [row["reference"] for row in rows] == [
        " ".join(words) for words in data.test.target_words
    ]
    assert all(int(row["hypothesis_words"]) == len(row["hypothesis"].split()) for row in rows)
    metrics = json.loads(call(*ask, "--beam", 2, "--json"))["test"]
    for name in ("bleu", "bleu_unsmoothed"):
        assert metrics[name] == pytest.approx(sum(float(row[name]) for row in rows) / len(rows))
    assert metrics["bleu"] > 0.02
    assert metrics["beam"] == 2
    assert "tok:none" in metrics["sacrebleu_signature"]
    assert f"sacrebleu {metrics['sacrebleu']:.6g}" in out
    assert "accuracy" in metrics
    assert "bleu" not in json.loads(call(*ask, "--json"))["test"]


def test_unknown_words_match_in_sentence_bleu_and_not_in_sacrebleu(made, monkeypatch):
    task = made[0]
    monkeypatch.setattr(
        scoring,
        "search_all",
        lambda model, sources, *a: [
            [type("H", (), {"ids": ids[1:-1], "log_prob": -1.0})] for ids in task.data.valid.target
        ],
    )
    words = [list(sentence) for sentence in task.data.valid.target_words]
    perfect, _ = scoring.translate_split(task, "valid", Search())
    assert perfect["bleu"] == pytest.approx(1)
    assert perfect["sacrebleu"] == pytest.approx(100)
    for sentence in words:
        sentence[2] = "inconnu"
    pairs = task.data.valid._replace(
        target_words=words, target=[task.data.target.encode(s) for s in words]
    )
    monkeypatch.setattr(task, "data", replace(task.data, valid=pairs))
    found, rows = scoring.translate_split(task, "valid", Search())
    assert "inconnu" in rows[0].reference
    assert found["bleu"] == pytest.approx(1)
    assert found["sacrebleu"] < 70


def test_training_ends_with_bleu_of_greedy_translations(made, call, tmp_path):
    sets = [word for change in SMALL for word in ("--set", change)]
    out = call("train", "en-fr", "--data", "synthetic", "--steps", 2, "--out", tmp_path, *sets)
    metrics = json.loads((tmp_path / "result.json").read_text())["test"]
    assert metrics["beam"] == 1
    assert f"beam 1, bleu {metrics['bleu']:.6g}" in out
    with (tmp_path / "test-greedy.csv").open() as file:
        assert len(list(csv.DictReader(file))) == len(made[0].data.test.text)


def test_the_validation_is_printed_before_the_test_split_is_translated(
    made, call, tmp_path, monkeypatch, capsys
):
    seen = []

    def more_metrics(task, split, out):
        seen.append(capsys.readouterr().out)
        return {}

    monkeypatch.setattr(type(made[0]), "more_metrics", more_metrics)
    sets = [word for change in SMALL for word in ("--set", change)]
    call("train", "en-fr", "--data", "synthetic", "--steps", 1, "--out", tmp_path, *sets)
    (before,) = seen
    assert "\nvalid: loss " in before
    assert "\ntest: " not in before


def test_the_translation_of_a_split_shows_progress(made, monkeypatch):
    texts = []

    def watched(items, text):
        texts.append((text, len(items)))
        return iter(items)

    monkeypatch.setattr(search, "watched", watched)
    batch = made[0].settings.data.eval_batch
    scoring.translate_split(made[0], "test", Search(beam=1, batch=batch))
    assert texts == [("translating test", -(-len(made[0].data.test.source) // batch))]
    search_all(made[0].model, made[0].data.test.source[:2], 9, Search(beam=1))
    assert len(texts) == 1


def test_a_missing_package_omits_bleu_alone(made, tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "sacrebleu.metrics", None)
    monkeypatch.setitem(sys.modules, "sacrebleu", None)
    assert made[0].more_metrics("test", tmp_path) == {}
    assert "no BLEU: it needs the Python package sacrebleu" in capsys.readouterr().out


def test_a_table_is_replaced_as_a_whole(tmp_path):
    row = scoring.Translation("a", "b", "c, d", 0.1, 0.0, 1, 1, 2, -3.0)
    path = tmp_path / "table.csv"
    scoring.write_table(path, [row])
    with path.open() as file:
        assert next(csv.DictReader(file))["hypothesis"] == "c, d"
    with pytest.raises(csv.Error):
        scoring.write_table(path, [row, None])
    assert [p.name for p in tmp_path.iterdir()] == ["table.csv"]
    assert "c, d" in path.read_text()


def test_contradicting_options_are_errors(run, language_model, error_of, monkeypatch):
    """Before anything is evaluated."""
    for task in (ptb.Task, IndependentBatches):
        monkeypatch.setattr(task, "evaluate", lambda *_: pytest.fail("evaluated"))

    def of_eval(task, path, *options):
        return error_of("eval", task, path, "--data", "synthetic", *options)

    assert "--csv requires a single split, got --splits valid,test" in of_eval(
        "en-fr", run, "--csv", "x.csv"
    )
    assert "--samples must be at least 1, got 0" in of_eval("en-fr", run, "--samples", 0)
    assert "beam must be at least 1, got 0" in of_eval("en-fr", run, "--beam", 0)
    assert "--csv must be a file" in of_eval("en-fr", run, "--splits", "test", "--csv", run)
    assert "--beam applies to en-es and en-fr, not to ptb" in of_eval(
        "ptb", language_model, "--beam", 2
    )
    assert "--temperature applies to ptb, not to en-fr" in of_eval(
        "en-fr", run, "--temperature", "auto"
    )
    assert "--dynamic requires --lr" in of_eval("ptb", language_model, "--dynamic", "sgd")
    assert "--columns requires --dynamic, which is not given" in of_eval(
        "ptb", language_model, "--columns", 2
    )
    assert "--temperature must be a finite number above 0, got 0" in of_eval(
        "ptb", language_model, "--temperature", 0
    )


def test_a_model_with_splits_has_no_temperature(language_model, error_of):
    state = load_checkpoint(language_model / "best.safetensors")
    state["description"]["settings"]["model"]["splits"] = [50]
    state["model"] |= {"loss.tombstones": torch.zeros(1, 8), "loss.tombstone_bias": torch.zeros(1)}
    save_checkpoint(language_model / "splits.safetensors", state)
    for temperature in ("auto", 2.0):
        error = error_of(
            *("eval", "ptb", language_model / "splits.safetensors", "--data", "synthetic"),
            *("--temperature", temperature),
        )
        assert f"--temperature must be 1 for a model with splits, got {temperature}" in error


def test_json_has_no_nan(language_model, call, monkeypatch):
    monkeypatch.setattr(ptb.Task, "evaluate", lambda *_: {"loss": math.nan, "tokens": 3})
    out = call("eval", "ptb", language_model, "--data", "synthetic", "--json")
    assert json.loads(out)["test"] == {"loss": None, "tokens": 3}


def test_perplexity_with_temperature_and_with_dynamic_evaluation(language_model, call):
    ask = ("eval", "ptb", language_model, "--data", "synthetic", "--json", "--splits")
    metrics = json.loads(call(*ask, "valid", "--temperature", "auto"))["valid"]
    assert metrics["tempered_perplexity"] <= metrics["perplexity"]
    assert 0.5 <= metrics["temperature"] <= 2
    fixed = json.loads(call(*ask, "valid", "--temperature", metrics["temperature"]))["valid"]
    assert fixed["tempered_loss"] == metrics["tempered_loss"]
    dynamic = ("--dynamic", "sgd", "--lr", 1, "--decay", 0.001, "--segment", 20, "--columns", 10)
    metrics = json.loads(call(*ask, "test", *dynamic))["test"]
    assert metrics["dynamic_perplexity"] < metrics["perplexity"]


# generate.


def test_generated_text(language_model, call):
    first = call("generate", language_model, "--words", 40, "--samples", 2, "--seed", 4)
    assert first == call("generate", language_model, "--words", 40, "--samples", 2, "--seed", 4)
    assert first != call("generate", language_model, "--words", 40, "--samples", 2, "--seed", 5)
    assert "<eos>" not in first
    texts = first[:-1].split("\n\n")
    assert len(texts) >= 2
    greedy = [
        call("generate", language_model, "--words", 20, "--temperature", 0, "--seed", seed)
        for seed in (0, 1)
    ]
    assert greedy[0] == greedy[1]
    assert greedy[0] == call(
        "generate", language_model, "--words", 20, "--top-k", 1, "--ops", "reference"
    )


def test_the_prompt_comes_first(language_model, call, capsys):
    word = restored(language_model, ("ptb",), ops="fused", device="cpu")[1]["vocabulary"][3]
    out = call("generate", language_model, "--prompt", f"{word} {word}", "--words", 10)
    assert out.startswith((f"{word} {word} ", f"{word} {word}\n"))
    assert call("generate", language_model, "--prompt", word, "--words", 0) == f"{word}\n"


@pytest.fixture
def with_unknown(language_model):
    """A checkpoint whose seventh word is <unk>, which is by far the most probable."""
    path = language_model / "unknown.safetensors"
    state = load_checkpoint(language_model / "best.safetensors")
    state["description"]["vocabulary"][6] = "<unk>"
    state["model"]["decoder_bias"][6] += 20
    save_checkpoint(path, state)
    return path


def test_no_unknown_never_samples_the_unknown_word(with_unknown, call):
    assert call("generate", with_unknown, "--words", 9).split() == ["<unk>"] * 9
    assert "<unk>" not in call("generate", with_unknown, "--words", 9, "--no-unknown")


def test_an_unknown_word_of_the_prompt_becomes_unk(
    with_unknown, language_model, call, error_of, capsys
):
    assert cli.main(["generate", str(with_unknown), "--prompt", "the xyz", "--words", "1"]) == 0
    out, err = capsys.readouterr()
    assert out == "the xyz <unk>\n"
    assert err == "fusedseq generate: 'xyz' is not in the vocabulary and is read as <unk>\n"
    error = error_of("generate", language_model, "--prompt", "the xyz")
    assert "--prompt must consist of words of the vocabulary, got 'xyz'" in error


def test_errors_of_generate_are_one_line(run, language_model, error_of):
    assert "must hold a model of ptb, got one of en-fr" in error_of("generate", run)
    assert "--samples must be at least 1, got 0" in error_of(
        "generate", language_model, "--samples", 0
    )
