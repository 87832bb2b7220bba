"""Domain adaptation of the word task: which contexts and labels each epoch trains on, and resuming.

Also the two settings that it needs: initial weights, and frozen parameters.
"""

import json
import re
import time
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
import torch
from fusedseq import cli
from fusedseq.data.contexts import ContextBatches, Contexts
from fusedseq.data.words import load
from fusedseq.models.word_predictor import WordPredictor
from fusedseq.tasks import words
from fusedseq.tasks.adaptation.pseudo_labels import AdaptationSettings, PseudoLabels, label
from fusedseq.tasks.training import Trainer, load_checkpoint, override

SMALL = ("embedding=16", "layers=1", "feedforward=16", "batch=512", "lr=.01")
WITH_LABELS = ("adapt", "adapt-after", "adapt-keep", "adapt-freeze", "adapt-finetune")


def made(preset, *changes, data=None):
    settings = override(words.PRESETS[preset], [*SMALL, *changes])
    torch.manual_seed(0)
    model = WordPredictor(len(domains().vocabulary), settings.model)
    return words.Task(settings, data(domains()) if data else domains(), model, seed=0)


@cache
def domains():
    return load("synthetic")


def small(data, n=700):
    """Domains with few windows, so that some epochs take little time."""

    def cut(contexts):
        return replace(contexts, positions=contexts.positions[:n], targets=contexts.targets[:n])

    return replace(data, **{split: cut(getattr(data, split)) for split in words.Task.splits})


def run(out, preset, steps, *changes, resume=False, data=small):
    task = made(preset, "epochs=3", f"steps={steps}", "save_steps=1", *changes, data=data)
    trainer = Trainer(task, task.settings.training, out)
    if resume:
        torch.manual_seed(99)
        trainer.resume()
    trainer.fit()
    return trainer


# The contexts and labels of an epoch.


@pytest.mark.parametrize("confidence", [0.0, 0.3])
def test_labels_are_the_most_probable_words(confidence):
    task = made("adapt")
    batches = ContextBatches(task.data.news_train, 100)
    found = label(task.model, batches, confidence)
    assert task.model.training  # the mode is restored
    task.model.eval()
    with torch.no_grad():
        p = torch.cat([task.model.logits(task.model(b.context)) for b in batches]).softmax(-1)
    confident = p.amax(-1) >= confidence
    assert torch.equal(found, torch.where(confident, p.argmax(-1), -1))
    assert confident.all() == (confidence == 0)
    assert confident.any()


def test_a_context_without_a_label_is_left_out():
    contexts = Contexts.of([[5, 6, 7, 8]], radius=2)
    left = contexts.labelled(torch.tensor([3, -1, 4, -1], dtype=torch.int32))
    assert left.targets.tolist() == [3, 4]
    assert torch.equal(left.windows(torch.arange(2)), contexts.windows(torch.tensor([0, 2])))


@pytest.mark.parametrize(
    ("preset", "changes", "wanted"),
    # The parts of epochs 0, 1, 2: g general, t true words, a b c the labels of epochs 0 1 2.
    [
        ("layers-4", (), ("g", "g", "g")),
        ("adapt", (), ("ga", "gb", "gc")),
        ("adapt-after", (), ("g", "gb", "gc")),
        ("adapt-keep", (), ("ga", "gab", "gabc")),
        ("adapt-keep", ("adaptation.when=after",), ("g", "gb", "gbc")),
        ("adapt-freeze", (), ("a", "b", "c")),
        ("adapt-finetune", ("adaptation.labels=true",), ("t", "t", "t")),
        ("adapt", ("adaptation.labels=true",), ("gt", "gt", "gt")),
    ],
)
def test_the_parts_of_an_epoch(preset, changes, wanted):
    task = made(preset, *changes, data=small)
    news = task.data.news_train
    parts = {"g": task.data.train.targets, "t": news.targets}
    parts |= {name: torch.full_like(news.targets, 50 + i) for i, name in enumerate("abc")}
    for epoch, names in enumerate(wanted):
        task.pseudo.label = lambda epoch=epoch: parts["abc"[epoch]]
        expected = torch.cat([parts[name] for name in names])
        batches = task.start_epoch(epoch)
        assert len(batches) == -(-len(expected) // 512)
        targets = torch.cat([batch.target for batch in batches])
        assert torch.equal(targets.sort().values, expected.sort().values)


@pytest.mark.parametrize("preset", WITH_LABELS)
def test_true_words_of_news_are_not_used_with_the_models_labels(tmp_path, preset):
    """Shuffled true targets give the same weights."""

    def shuffled(data):
        data = small(data)
        order = torch.randperm(len(data.news_train), generator=torch.Generator().manual_seed(1))
        return replace(
            data, news_train=replace(data.news_train, targets=data.news_train.targets[order])
        )

    one, other = (
        run(tmp_path / name, preset, 5, data=data) for name, data in (("a", small), ("b", shuffled))
    )
    assert all(
        torch.equal(one.task.model.state_dict()[k], v)
        for k, v in other.task.model.state_dict().items()
    )
    supervised = [
        run(tmp_path / name, preset, 5, "adaptation.labels=true", data=data)
        for name, data in (("c", small), ("d", shuffled))
    ]
    weights = [[*r.task.model.state_dict().values()] for r in supervised]
    assert not all(map(torch.equal, *weights))


def test_each_epoch_is_labelled_once():
    labels = PseudoLabels(
        AdaptationSettings("model"), iter([torch.tensor([1]), torch.tensor([2])]).__next__
    )
    assert [labels.of(0), labels.of(0), labels.of(1)] == [
        [torch.tensor([1])],
        [torch.tensor([1])],
        [torch.tensor([2])],
    ]


def test_fine_tuning_on_true_words_improves_news(tmp_path):
    """The upper bound for labels; the synthetic domains differ in which verb follows which noun."""
    general = run(tmp_path / "general", "layers-4", 60, "save_steps=none", data=None)
    before = general.validate()
    tuned = made("adapt-finetune", "adaptation.labels=true", "steps=20")
    tuned.model.load_state_dict(general.task.model.state_dict())
    trainer = Trainer(tuned, tuned.settings.training, tmp_path / "tuned")
    trainer.fit()
    after = trainer.validate()
    assert after["accuracy"] > before["news_accuracy"] + 0.03
    assert after["loss"] < before["news_loss"]


@pytest.mark.parametrize(("select", "other"), [("general", "news"), ("news", "general")])
def test_the_loss_of_the_selected_domain_selects_the_best_weights(select, other):
    task = made("adapt", f"adaptation.select={select}", data=small)
    task.model.eval()
    splits = {"general": "valid", "news": "news_valid"}
    figures = task.validate()
    assert figures["loss"] == task.evaluate(splits[select])["loss"]
    assert figures[f"{other}_loss"] == task.evaluate(splits[other])["loss"]


# Resuming.


@pytest.mark.parametrize("preset", WITH_LABELS)
def test_a_run_resumed_at_any_step_has_the_same_labels(tmp_path, preset):
    whole = run(tmp_path / "whole", preset, 10)
    for steps in range(1, whole.step + 1):
        part = run(tmp_path / "parts", preset, steps, resume=steps > 1)
        assert (part.step, part.epoch, part.index) != (0, 0, 0)
    assert (part.epoch, part.index) == (whole.epoch, whole.index)
    assert all(map(torch.equal, part.task.pseudo.labels, whole.task.pseudo.labels))
    assert len(part.task.pseudo.labels) == len(whole.task.pseudo.labels) > 0
    for name, weight in whole.task.model.state_dict().items():
        assert torch.equal(part.task.model.state_dict()[name], weight)


def test_resuming_within_an_epoch_does_not_label_again(tmp_path):
    run(tmp_path, "adapt", 2)
    task = made("adapt", "steps=3", data=small)
    task.pseudo.label = lambda: pytest.fail("labelled again")
    trainer = Trainer(task, task.settings.training, tmp_path)
    trainer.resume()
    trainer.fit()
    assert trainer.step == 3


def test_labelling_counts_as_training_time(tmp_path):
    task = made("adapt", "steps=1", data=small)
    make = task.pseudo.label
    task.pseudo.label = lambda: (time.sleep(0.5), make())[1]
    trainer = Trainer(task, task.settings.training, tmp_path)
    trainer.fit()
    assert trainer.seconds > 0.5


def test_a_checkpoint_saved_without_a_step_has_the_labels(tmp_path):
    run(tmp_path, "adapt-keep", 2)
    before = load_checkpoint(tmp_path / "last.safetensors")["task"]
    run(tmp_path, "adapt-keep", 2, resume=True)
    after = load_checkpoint(tmp_path / "last.safetensors")["task"]
    assert before["epoch"] == after["epoch"] == 0
    assert all(map(torch.equal, before["labels"], after["labels"]))


# Initial weights, frozen parameters.


def sets(*changes):
    return [word for change in (*SMALL, *changes) for word in ("--set", change)]


def train(preset, out, *more):
    return cli.main(
        [
            "train",
            "words",
            "--preset",
            preset,
            "--data",
            "synthetic",
            "--steps",
            "2",
            "--skip-test",
            "--out",
            str(out),
            *sets(),
            *more,
        ]
    )


def test_a_preset_starts_from_the_weights_of_another(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert train("adapt-freeze", "frozen") == 2
    assert (
        "starts from a trained words/layers-4, and there is no runs/words/layers-4-0"
        in capsys.readouterr().err
    )
    assert train("layers-4", "runs/words/layers-4-0") == 0
    assert train("adapt-freeze", "frozen") == 0
    best, last = (
        load_checkpoint(Path(p))
        for p in ("runs/words/layers-4-0/best.safetensors", "frozen/last.safetensors")
    )
    same = {
        name: torch.equal(weight, last["model"][name]) for name, weight in best["model"].items()
    }
    assert same == {name: name.startswith(("embedding.", "output.")) for name in best["model"]}
    assert len(last["optimization"]["optimizer"]["state"]) == sum(
        not equal for equal in same.values()
    )
    result = json.loads(Path("frozen/result.json").read_text())
    assert result["from"] == "layers-4-0"
    assert "--from" not in result["command"]  # the preset implies it
    assert train("base", "next", "--set", "layers=1", "--from", "frozen") == 0
    assert json.loads(Path("next/result.json").read_text())["command"].endswith(" --from frozen")
    assert train("adapt-freeze", "frozen", "--resume") == 0
    assert train("adapt-freeze", "frozen", "--resume", "--from", "other/best.safetensors") == 2
    assert "was started with from layers-4-0, got other" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (
            ["--set", "embedding=8"],
            r"does not fit this model: embedding.weight must be \((\d+), 8\), got \(\1, 16\)",
        ),
        (["--set", "layers=2"], "encoder.layers.1"),
        (["--set", "tied=true"], "output.weight is not a parameter of it"),
        (["--set", "vocabulary=50"], "a model of another vocabulary"),
        (["--from", "nowhere"], "nowhere does not exist"),
    ],
)
def test_mismatching_weights_are_named(tmp_path, capsys, more, message):
    assert train("layers-4", tmp_path / "one") == 0
    assert train("layers-4", tmp_path / "other", "--from", str(tmp_path / "one"), *more) == 2
    assert re.search(message, capsys.readouterr().err)


def test_weights_of_another_task_are_refused(tmp_path, capsys):
    assert train("layers-4", tmp_path / "one") == 0
    assert (
        cli.main(
            [
                "train",
                "ptb",
                "--data",
                "synthetic",
                "--out",
                str(tmp_path / "two"),
                "--from",
                str(tmp_path / "one"),
                "--set",
                "embedding=8",
                "--set",
                "hidden=8",
            ]
        )
        == 2
    )
    assert "holds a model of words, not of ptb" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("patterns", "message"),
    [
        (
            "embedding.*,emb",
            r"training.freeze: 'emb' matches no parameter; the parameters are embedding\.\*, "
            r"positions\.\*, encoder\.\*, output\.\*",
        ),
        ("*", r"training.freeze must leave a parameter to train, got '\*'"),
    ],
)
def test_a_pattern_that_freezes_no_or_every_parameter_is_an_error(tmp_path, patterns, message):
    task = made("layers-4", f"freeze={patterns}")
    with pytest.raises(ValueError, match=message):
        Trainer(task, task.settings.training, tmp_path)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (("adaptation.labels=yes",), "adaptation.labels must be none, model or true, got 'yes'"),
        (("adaptation.when=now",), "adaptation.when must be before or after, got 'now'"),
        (("confidence=1.0",), r"adaptation.confidence must be in \[0, 1\), got 1.0"),
        (
            ("adaptation.general=false",),
            "adaptation.general must be true where an epoch has no other labels",
        ),
        (
            ("adaptation.labels=model", "when=after", "adaptation.general=false"),
            "adaptation.general must be true",
        ),
    ],
)
def test_invalid_settings_are_errors(changes, message):
    with pytest.raises(ValueError, match=message):
        override(words.PRESETS["base"], changes)


def test_an_epoch_without_a_confident_label_is_an_error():
    task = made("adapt-finetune", "confidence=.9999")
    with pytest.raises(
        ValueError, match=r"adaptation.confidence = 0.9999 leaves no context to train on in epoch 1"
    ):
        len(task.start_epoch(0))
