"""The trainer on ptb: learning, exact resume, checkpoints, settings, the command line."""

import csv
import dataclasses
import itertools
import json
import math
import os
import resource
import signal
import subprocess
import sys
import time
import typing
from pathlib import Path

import pytest
import torch
from fusedseq import cli, fused, reference
from fusedseq.data import corpus
from fusedseq.tasks import ptb
from fusedseq.tasks.catalog import TASKS, task_module
from fusedseq.tasks.training import (
    CheckpointError,
    Trainer,
    TrainingError,
    TrainingSettings,
    as_dict,
    from_dict,
    load_checkpoint,
    override,
    save_checkpoint,
)
from fusedseq.tasks.training.optimization import Optimization, Schedule

TINY = ("embedding=8", "hidden=8", "layers=2", "batch=40", "bptt=20", "lr=5", "save_steps=4")
ADAM = (
    "optimizer=adam",
    "lr=0.01",
    "averaging=tail",
    "tail_from=1",
    "rank=3",
    "output=sum",
    "reset_probability=0.1",
    "eval_steps=5",
    "state_dropout=0.3",
    "locked=false",
)
# Averaging from the third epoch on, where validation gets worse.
ASGD = ("averaging=nt-asgd", "nonmono=1")
KINDS = pytest.mark.parametrize("kind", [(), ASGD, ADAM], ids=["sgd", "asgd", "adam"])


@pytest.fixture(scope="module")
def miniature():
    whole = corpus.load("synthetic")
    return corpus.Corpus(whole.vocabulary, whole.train[:5000], whole.valid[:500], whole.test[:500])


def trainer(out, miniature, *changes, ops=reference, preset="mogrifier-awd", seed=0):
    torch.manual_seed(seed)
    settings = override(ptb.PRESETS[preset], [*TINY, *changes])
    return Trainer(ptb.Task(settings, miniature, ops=ops, seed=seed), settings.training, out)


def losses(out, table="steps", column="loss"):
    with (Path(out) / f"{table}.csv").open() as file:
        return [(int(row["step"]), row[column]) for row in csv.DictReader(file)]


@KINDS
@pytest.mark.parametrize("cuts", [(9, 10), (14, 24)], ids=str)  # an epoch has 6 to 8 steps
def test_resumed_equals_uninterrupted(tmp_path, miniature, kind, cuts, monkeypatch):
    """Weights, losses and decisions, bit for bit, also when averaging starts in between."""
    if kind is ASGD:
        monkeypatch.setattr(
            ptb.Task, "validate", lambda task: {"loss": 10 - task.evaluate("valid")["loss"]}
        )
    whole = trainer(tmp_path / "whole", miniature, *kind, "steps=30")
    whole.fit()
    for steps in (*cuts, 30):
        torch.manual_seed(99)  # the seed of a new process must not matter
        part = trainer(tmp_path / "parts", miniature, *kind, f"steps={steps}", seed=0)
        if steps != cuts[0]:
            part.resume()
        part.fit()
    assert losses(tmp_path / "parts") == losses(tmp_path / "whole")
    assert len(losses(tmp_path / "whole")) == 30
    for column in ("train_loss", "valid_loss", "train_lr", "train_averaged"):
        assert losses(tmp_path / "parts", "epochs", column) == losses(
            tmp_path / "whole", "epochs", column
        )
    for name, p in whole.task.model.state_dict().items():
        assert torch.equal(part.task.model.state_dict()[name], p), name
    assert part.schedule.state_dict() == whole.schedule.state_dict()
    if kind:
        assert whole.optimization.averaging
    for file in ("last", "best"):
        states = [
            load_checkpoint(tmp_path / run / f"{file}.safetensors") for run in ("whole", "parts")
        ]
        assert torch.equal(*(state["model"]["embedding.weight"] for state in states))
        assert states[0]["position"] == states[1]["position"]


def command(out, *arguments):
    sets = [word for change in (*TINY, "save_steps=3") for word in ("--set", change)]
    return [
        "train",
        "ptb",
        "--data",
        "synthetic",
        "--ops",
        "reference",
        "--out",
        str(out),
        *sets,
        *arguments,
    ]


def test_killed_and_resumed_equals_uninterrupted(tmp_path, capsys):
    """The process is killed twice, with SIGKILL, at an arbitrary moment."""
    # One thread, as in this process: the number of threads may change the rounding.
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}
    for at_least in (5, 20):
        resume = ["--resume"] if (tmp_path / "killed").exists() else []
        process = subprocess.Popen(
            [
                sys.executable,
                "-m",
                "fusedseq",
                *command(tmp_path / "killed", "--epochs", "1000", *resume),
            ],
            env=environment,
            stdout=subprocess.DEVNULL,
        )
        steps = tmp_path / "killed" / "steps.csv"
        while process.poll() is None and not (
            steps.exists() and len(steps.read_text().split("\n")) > at_least + 2
        ):
            time.sleep(0.01)
        process.send_signal(signal.SIGKILL)
        assert process.wait() == -signal.SIGKILL
    reached = load_checkpoint(tmp_path / "killed" / "last.safetensors")["position"]["step"]
    assert reached >= 18
    more = ["--steps", str(reached + 5), "--skip-test"]
    assert cli.main(command(tmp_path / "killed", "--resume", *more)) == 0
    assert cli.main(command(tmp_path / "whole", "--epochs", "1000", *more)) == 0
    assert losses(tmp_path / "killed") == losses(tmp_path / "whole")
    assert len(losses(tmp_path / "whole")) == reached + 5
    assert f"step {reached}, into" in capsys.readouterr().out


def test_a_signal_ends_at_a_step_boundary_with_a_checkpoint(tmp_path, miniature):
    run = trainer(tmp_path, miniature, "epochs=1000")
    step = run._train

    def interrupt(batch):
        step(batch)
        if run.step == 3:
            os.kill(os.getpid(), signal.SIGINT)

    run._train = interrupt
    assert run.fit() == "interrupted"
    assert load_checkpoint(tmp_path / "last.safetensors")["position"]["step"] == 3


def test_equal_seeds_give_equal_losses(tmp_path, miniature, ops):
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        trainer(tmp_path / name, miniature, "steps=5", ops=ops, seed=seed).fit()
    assert losses(tmp_path / "a") == losses(tmp_path / "b") != losses(tmp_path / "c")


def test_a_reference_checkpoint_continues_under_fused(tmp_path, miniature):
    whole = trainer(tmp_path / "whole", miniature, "steps=16")
    whole.fit()
    trainer(tmp_path / "mixed", miniature, "steps=8").fit()
    mixed = trainer(tmp_path / "mixed", miniature, "steps=16", ops=fused)
    mixed.resume()
    mixed.fit()
    found, wanted = (
        [float(loss) for _, loss in losses(tmp_path / run)] for run in ("mixed", "whole")
    )
    assert found[:8] == wanted[:8]
    assert found == pytest.approx(wanted, rel=1e-4)


def test_it_learns_the_grammar(tmp_path, ops):
    """The loss is lower than that of the word frequencies."""
    whole = corpus.load("synthetic")
    frequency = torch.bincount(whole.train, minlength=len(whole.vocabulary)).double() / len(
        whole.train
    )
    unigram = -frequency[whole.valid].log().mean().item()
    changes = (
        "embedding=24",
        "hidden=24",
        "batch=20",
        "lr=0.01",
        "optimizer=adam",
        "epochs=4",
        "layers=1",
    )
    run = trainer(tmp_path, whole, *changes, ops=ops, preset="lstm")
    run.fit()
    assert run.schedule.best < unigram - 0.5
    assert run.schedule.losses == sorted(run.schedule.losses, reverse=True)


# Averaging, annealing, stopping.


def quadratic(settings, steps):
    """(parameter, its average) after each of `steps` steps on a noisy parabola."""
    torch.manual_seed(0)
    p = torch.nn.Parameter(torch.randn(5))
    optimization, path = Optimization([p], settings), []
    for step in range(steps):
        if step == 3:
            optimization.start_averaging()
        optimization.zero_grad()
        ((p + torch.randn(5)) ** 2).sum().backward()
        optimization.step(1.0)
        raw = p.detach().clone()
        with optimization.averaged():
            path.append((raw, p.detach().clone()))
        assert torch.equal(p, raw)
    return path


def test_tail_averaging_is_the_mean_since_its_start():
    path = quadratic(TrainingSettings(lr=0.1, optimizer="adam", averaging="tail"), 10)
    assert all(torch.equal(raw, average) for raw, average in path[:3])
    torch.testing.assert_close(path[-1][1], torch.stack([raw for raw, _ in path[3:]]).mean(0))


def test_nt_asgd_averages_from_its_second_step():
    path = quadratic(TrainingSettings(lr=0.1, averaging="nt-asgd"), 10)
    assert all(torch.equal(raw, average) for raw, average in path[:3])
    torch.testing.assert_close(path[-1][1], torch.stack([raw for raw, _ in path[4:]]).mean(0))


def test_clipping_and_weight_decay():
    p = torch.nn.Parameter(torch.tensor([3.0, 4.0]))
    optimization = Optimization([p], TrainingSettings(lr=2.0, clip=0.5, weight_decay=0.1))
    (50 * p).sum().backward()
    assert optimization.step(0.25).item() == pytest.approx(50 * math.sqrt(2))
    step = 0.5 * (0.5 / math.sqrt(2) + 0.1 * torch.tensor([3.0, 4.0]))
    torch.testing.assert_close(p.detach(), torch.tensor([3.0, 4.0]) - step)


def test_adam_is_that_of_torch_with_the_settings():
    ours, theirs = (torch.nn.Parameter(torch.tensor([3.0, -4.0])) for _ in range(2))
    numbers = {"lr": 0.1, "weight_decay": 0.2, "eps": 0.3}
    settings = TrainingSettings(optimizer="adam", beta1=0.5, beta2=0.7, **numbers)
    optimization = Optimization([ours], settings)
    adam = torch.optim.Adam([theirs], betas=(0.5, 0.7), **numbers)
    for gradient in ([1.0, 0.1], [-2.0, 0.3], [0.5, -0.2]):
        ours.grad, theirs.grad = torch.tensor(gradient), torch.tensor(gradient)
        optimization.step(1.0)
        adam.step()
        torch.testing.assert_close(ours, theirs)


def observed(values, **changes):
    schedule = Schedule(TrainingSettings(**changes))
    return [(schedule.observe(value), schedule.stopped) for value in values]


def test_annealing_after_four_and_stopping_after_six_validations():
    seen = observed([5, 4, *[4.5] * 6], anneal_after=4, stop_after=6)
    assert [i for i, (events, _) in enumerate(seen) if "improved" in events] == [0, 1]
    assert [i for i, (events, _) in enumerate(seen) if "anneal" in events] == [5]
    assert [i for i, (_, stopped) in enumerate(seen) if stopped] == [7]


@pytest.mark.parametrize(
    ("changes", "starts"), [({"tail_after": 2}, [3, 6]), ({"tail_from": 4}, [3, 4, 5, 6])]
)
def test_tail_averaging_starts_without_improvement_or_at_a_number(changes, starts):
    seen = observed([5, 4, 4.5, 4.5, 3, 3.5, 3.5], averaging="tail", **changes)
    assert [i for i, (events, _) in enumerate(seen) if "average" in events] == starts


def test_an_equal_loss_is_no_improvement():
    seen = observed([2, 2, 2, 1], stop_after=2)
    assert ["improved" in events for events, _ in seen] == [True, False, False, True]
    assert [stopped for _, stopped in seen] == [False, False, True, False]


def test_nt_asgd_starts_as_published():
    values = [9, 8, 7, 6, 5, 6.7, 6.6, 6.95, 6.5, 6.85, 6.1]
    published = []
    log = []
    for i, value in enumerate(values):
        if len(log) > 5 and value > min(log[:-5]):
            published.append(i)
        log.append(value)
    seen = observed(values, averaging="nt-asgd")
    assert [i for i, (events, _) in enumerate(seen) if "average" in events] == published == [9, 10]


# Checkpoints.

STATE = {
    "weights": {
        "a.b": torch.arange(6.0).view(2, 3).t(),
        "half": torch.ones(2, dtype=torch.bfloat16),
    },
    "optimizer": {
        "state": {0: {"step": torch.tensor(3.0)}, 1: {}},
        "betas": (0.9, 0.999),
        "lr": 1 / 3,
    },
    "hidden": (torch.zeros(2, 0, 4), [torch.ones(3, dtype=torch.int64)]),
    "names": ["<eos>", "é"],
    "none": None,
    "flag": True,
    "big": 2**63 - 1,
}


def equal(a, b):
    if isinstance(a, torch.Tensor):
        return a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, dict):
        return list(a) == list(b) and all(equal(a[key], b[key]) for key in a)
    if isinstance(a, (list, tuple)):
        return type(a) is type(b) and len(a) == len(b) and all(map(equal, a, b))
    return a == b and type(a) is type(b)


def test_a_checkpoint_round_trip(tmp_path):
    save_checkpoint(tmp_path / "c", STATE)
    assert equal(load_checkpoint(tmp_path / "c"), STATE)
    assert [path.name for path in tmp_path.iterdir()] == ["c"]


def test_any_damage_is_detected(tmp_path):
    save_checkpoint(tmp_path / "c", STATE)
    whole = (tmp_path / "c").read_bytes()
    for length in (0, 5, 100, len(whole) // 2, len(whole) - 1):
        (tmp_path / "cut").write_bytes(whole[:length])
        with pytest.raises(CheckpointError, match="cut is truncated or not a checkpoint"):
            load_checkpoint(tmp_path / "cut")
    for at in range(8, len(whole), 7):
        (tmp_path / "bit").write_bytes(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
        try:
            found = load_checkpoint(tmp_path / "bit")
        except CheckpointError:
            continue
        assert equal(found, STATE), at  # the bit had no meaning: a blank between parts of the JSON
    with pytest.raises(CheckpointError, match="does not exist"):
        load_checkpoint(tmp_path / "none")


def test_a_pickle_is_not_loaded(tmp_path):
    torch.save(STATE, tmp_path / "c")
    with pytest.raises(CheckpointError, match="truncated or not a checkpoint"):
        load_checkpoint(tmp_path / "c")


def test_a_full_disk_leaves_the_previous_checkpoint(tmp_path):
    save_checkpoint(tmp_path / "c", STATE)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, hard))
    try:
        with pytest.raises(
            TrainingError, match=r"could not be written \(.*the previous checkpoint is unchanged"
        ):
            save_checkpoint(tmp_path / "c", {"much": torch.zeros(10_000)})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert equal(load_checkpoint(tmp_path / "c"), STATE)
    assert [path.name for path in tmp_path.iterdir()] == ["c"]


def test_a_loss_that_is_not_finite_stops_the_run(tmp_path, miniature):
    trainer(tmp_path, miniature, "steps=6").fit()
    run = trainer(tmp_path, miniature, "steps=20", "log_steps=5")
    run.resume()
    with torch.no_grad():
        run.task.model.decoder_bias[0] = math.nan
    with pytest.raises(
        TrainingError, match=r"loss nan at step 7 .*the last checkpoint is .*last\.safetensors"
    ):
        run.fit()
    state = load_checkpoint(tmp_path / "last.safetensors")
    assert state["position"]["step"] == 6
    assert all(p.isfinite().all() for p in state["model"].values())


# Settings and the command line.


@pytest.mark.parametrize("preset", ptb.PRESETS)
def test_settings_survive_json(preset):
    settings = ptb.PRESETS[preset]
    assert from_dict(ptb.Settings, json.loads(json.dumps(as_dict(settings)))) == settings


def test_overrides():
    changes = [
        "model.hidden=(7, 8)",
        "lr=1",
        "rank=none",
        "tied=FALSE",
        "training.steps=5",
        "output=sum",
    ]
    changed = override(ptb.PRESETS["awd"], changes)
    assert (changed.model.hidden, changed.training.lr, changed.model.tied) == ((7, 8), 1.0, False)
    assert type(changed.training.lr) is float
    assert (changed.model.rank, changed.training.steps, changed.model.output) == (None, 5, "sum")


ERRORS = {
    "unknown preset 'nope'; known are lstm, dropout": ["--preset", "nope"],
    "unknown key 'model.hiden'; known are model.embedding": ["--set", "model.hiden=3"],
    "--set must be key=value, got 'hidden'": ["--set", "hidden"],
    "model.layers must be a whole number, got 'two'": ["--set", "layers=two"],
    "dropout must be in [0, 1], got 1.5": ["--set", "dropout=1.5"],
    "rounds must be a whole number in [0, 64), got -1": ["--set", "rounds=-1"],
    "model.hidden must be a whole number, or several separated by commas, got 'abc'": [
        "--set",
        "hidden=abc",
    ],
    "model.rank must be a whole number or none, got 'abc'": ["--set", "rank=abc"],
    "model.splits must be whole numbers separated by commas, got 'abc'": ["--set", "splits=abc"],
    "model.tied must be True or False, got 3": ["--set", "tied=3"],
    "training.averaging must be none, nt-asgd or tail, got 'best'": ["--set", "averaging=best"],
    "training.precision must be fp32 or bf16, got 'fp8'": ["--set", "precision=fp8"],
    "training.accumulate must be at least 1, got 0": ["--set", "accumulate=0"],
    "training.lr_schedule must be constant, linear, cosine or inverse-sqrt, got 'step'": [
        "--set",
        "lr_schedule=step",
    ],
    "training.lr_schedule inverse-sqrt needs warmup_steps of at least 1, got 0": [
        "--set",
        "lr_schedule=inverse-sqrt",
    ],
    "training.lr_schedule linear needs decay_steps above warmup_steps = 0, got None": [
        "--set",
        "lr_schedule=linear",
    ],
    "training.lr_schedule cosine needs decay_steps above warmup_steps = 5, got 5": [
        "--set",
        "lr_schedule=cosine",
        "--set",
        "warmup_steps=5",
        "--set",
        "decay_steps=5",
    ],
    "training.warmup_steps must be at least 0, got -1": ["--set", "warmup_steps=-1"],
    "training.epochs must be at least 0, got -1": ["--epochs", "-1"],
    "--data must be a directory, got nowhere, which does not exist": ["--data", "nowhere"],
    "--from: checkpoint nowhere does not exist": ["--from", "nowhere"],
    "--ops must be fused or reference for ptb, got torch_mha": ["--ops", "torch_mha"],
    "--resume: nowhere is not a directory": ["--resume", "--out", "nowhere"],
    "--device must be cpu, cuda or cuda:N, got tpu": ["--device", "tpu"],
    "--device must be cpu, cuda or cuda:N, got meta": ["--device", "meta"],
    "--device must be cpu, cuda or cuda:N, got cuda:x": ["--device", "cuda:x"],
    "training.lr must be a finite number, got inf": ["--set", "lr=1e400"],
    "training.lr must be a finite number, got 'nan'": ["--set", "lr=nan"],
    "training.lr must be a finite number, got 1000": ["--set", "lr=1" + "0" * 400],
    "training.lr must be a finite number, got '---": ["--set", "lr=" + "-" * 5000 + "1"],
    "model.embedding must be at most 10,000,000, got 1,000,": ["--set", "embedding=1" + "0" * 30],
    "model.layers must be at most 1,000, got 1,000,000": ["--set", "layers=1000000"],
    "data.bptt must be at most 10,000,000, got 10,000,001": ["--set", "bptt=10000001"],
}


def test_the_order_of_settings_does_not_matter():
    assignments = ["lr_schedule=cosine", "decay_steps=9", "warmup_steps=3"]
    found = [override(ptb.PRESETS["awd"], order) for order in itertools.permutations(assignments)]
    assert found == [found[0]] * 6
    assert (found[0].training.lr_schedule, found[0].training.decay_steps) == ("cosine", 9)
    assert override(ptb.PRESETS["awd"], ["lr=1", "lr=2"]).training.lr == 2


@pytest.mark.parametrize("message", ERRORS)
def test_a_wrong_value_is_one_sentence_and_exit_code_2(message, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert cli.main(["train", "ptb", "--data", "synthetic", *ERRORS[message]]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1
    assert not list(tmp_path.glob("**/*.safetensors"))


def test_a_limit_of_steps_may_replace_that_of_epochs(tmp_path):
    words = ["--set", "epochs=none", "--steps", "1", "--skip-test", "--data", "synthetic"]
    small = [word for size in ("embedding", "hidden") for word in ("--set", f"{size}=8")]
    assert (
        cli.main(["train", "ptb", "--preset", "lstm", *small, *words, "--out", str(tmp_path)]) == 0
    )


@pytest.mark.parametrize("count", ["", "abc", "0", "-1", "2.0"])
def test_a_number_of_processes_that_torchrun_does_not_set_is_named(count, monkeypatch, capsys):
    monkeypatch.setenv("WORLD_SIZE", count)
    assert cli.main(["train", "reverse", "--steps", "1"]) == 2
    error = capsys.readouterr().err
    assert f"$WORLD_SIZE must be a whole number from 1, as torchrun's, got {count!r}" in error
    assert error.count("\n") == 1


def test_the_directory_of_a_run_must_not_be_empty_text(tmp_path, monkeypatch, capsys):
    """As it is where a shell variable is not set: it would be the current directory."""
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as exit:
        cli.main(["train", "reverse", "--steps", "1", "--out", ""])
    assert exit.value.code == 2
    assert "--out: must not be empty" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "wrong", [["train", "chess"], ["train", "ptb", "--ops", "magic"], ["train", "ptb", "--bogus"]]
)
def test_a_wrong_option_is_exit_code_2(wrong, capsys):
    with pytest.raises(SystemExit) as exit:
        cli.main(wrong)
    assert exit.value.code == 2
    assert capsys.readouterr().err.count("\n") == 1


@pytest.mark.parametrize(
    "command",
    [
        ["train", "ptb", "--data", "synthetic", "--preset", ""],
        ["tune", "reverse", "--preset", ""],
        ["ensemble", "words", "--data", "synthetic", "--members", ""],
    ],
)
def test_an_empty_name_is_not_the_default(command, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit, match="2"):
        cli.main(command)
    assert f"argument {command[-2]}: must not be empty" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("task", TASKS)
def test_every_type_of_setting_has_words(task):
    """The words of a refusal are written for people: no setting is refused by a type's name."""
    module = task_module(task)
    settings = module.PRESETS[module.DEFAULT_PRESET]
    for section in dataclasses.fields(settings):
        values = getattr(settings, section.name)
        for name, kind in typing.get_type_hints(type(values)).items():
            if kind not in (str, str | None):
                with pytest.raises(ValueError, match=f"^{section.name}.{name} must be .*, got '@'"):
                    override(settings, [f"{section.name}.{name}=@"])


def test_train_resume_and_eval_from_the_command_line(tmp_path, capsys):
    out = tmp_path / "run"
    assert cli.main(command(out, "--epochs", "1")) == 0
    result = json.loads((out / "result.json").read_text())
    capsys.readouterr()
    for _ in range(2):
        evaluate = ["eval", "ptb", str(out), "--data", "synthetic", "--ops", "reference", "--json"]
        assert cli.main(evaluate) == 0
        assert json.loads(capsys.readouterr().out) == {
            split: result[split] for split in ("valid", "test")
        }
    assert list((out / "tensorboard").iterdir())
    # After one epoch only the loss has more than one value, that of the steps.
    assert (out / "loss.png").read_bytes().startswith(b"\x89PNG")
    assert not (out / "perplexity.png").exists()

    assert cli.main(command(out)) == 2
    assert "already holds a run" in capsys.readouterr().err
    for change, message in (
        (["--set", "lr=7"], "training.lr 5.0, got 7.0"),
        (["--seed", "4"], "seed 0, got 4"),
        (["--preset", "lstm"], "preset mogrifier-awd, got lstm"),
    ):
        assert cli.main(command(out, "--resume", *change)) == 2
        assert message in capsys.readouterr().err

    last = out / "last.safetensors"
    last.write_bytes(last.read_bytes()[:-100])
    assert cli.main(command(out, "--resume")) == 2
    assert "last.safetensors is truncated" in capsys.readouterr().err


def test_evaluating_on_other_data_is_an_error(tmp_path, capsys):
    assert cli.main(command(tmp_path / "run", "--steps", "1", "--skip-test")) == 0
    for split in ("train", "valid", "test"):
        (tmp_path / f"{split}.txt").write_text("the dog sees a cat\n" * 50)
    assert cli.main(["eval", "ptb", str(tmp_path / "run"), "--data", str(tmp_path)]) == 2
    assert "--data must be the data that the checkpoint was trained on" in capsys.readouterr().err
