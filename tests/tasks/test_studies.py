"""`fusedseq tune`: results, sharing, resuming, and failures of single runs."""

import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time

import optuna
import pytest
import torch
from fusedseq import cli
from fusedseq.tasks.experiments import results
from fusedseq.tasks.studies import search as searching
from fusedseq.tasks.studies import trials
from fusedseq.tasks.training import TrainingError

from tests.support.study_runs import interrupted_at, table

SPACE = (
    "--space",
    "embedding=16",
    "--space",
    "heads=1,2",
    "--space",
    "layers=1",
    "--space",
    "feedforward=16",
    "--space",
    "dropout=0,.1",
    "--space",
    "mask=true,false",
    "--space",
    "lr=1e-9,.01",
)
SMALL = ("--ops", "reference", "--set", "sizes=4,20,100", "--set", "limit=none", *SPACE)


def arguments(out, *more, total=2, epochs=2):
    return [
        "tune",
        "reverse",
        *SMALL,
        "--trials",
        str(total),
        "--epochs",
        str(epochs),
        "--out",
        str(out),
        *more,
    ]


def search(out, *more, **changes):
    """The exit code."""
    return cli.main(arguments(out, *more, **changes))


def by_number(out):
    return sorted(table(out), key=lambda row: int(row["trial"]))


def parameters(row):
    return {key: value for key, value in row.items() if "." in key}


@pytest.fixture(autouse=True)
def no_tensorboard(monkeypatch):
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)


# The search.


def test_a_study_finds_the_better_of_two_learning_rates(tmp_path, capsys):
    assert search(tmp_path, total=3) == 0
    rows = table(tmp_path)
    assert [row["state"] for row in rows] == ["complete"] * 3
    assert {row["training.lr"] for row in rows} == {"1e-09", "0.01"}
    assert rows[0]["training.lr"] == "0.01"
    assert rows[-1]["training.lr"] == "1e-09"
    assert [float(row["loss"]) for row in rows] == sorted(float(row["loss"]) for row in rows)
    for name in ("history.png", "importances.png"):
        assert (tmp_path / name).read_bytes().startswith(b"\x89PNG")
    remaining = [path.relative_to(tmp_path) for path in tmp_path.rglob("*.safetensors")]
    assert [str(path) for path in remaining] == [
        f"trials/tune-{int(rows[0]['trial']):04}/best.safetensors"
    ]
    text, errors = capsys.readouterr()
    assert "Warning" not in text + errors
    command = shlex.split(re.search(r"fusedseq (train .*)", text)[1])
    assert cli.main([*command, "--epochs", "2", "--out", str(tmp_path / "again")]) == 0
    again = json.loads((tmp_path / "again/result.json").read_text())
    assert again["valid"]["loss"] == pytest.approx(float(rows[0]["loss"]), rel=1e-6)


def test_a_study_continues_where_it_ended(tmp_path, capsys):
    assert search(tmp_path / "parts", total=1) == 0
    first = by_number(tmp_path / "parts")[0]
    assert search(tmp_path / "parts", total=3) == 0
    assert search(tmp_path / "parts", total=3) == 0  # nothing is left
    assert search(tmp_path / "whole", total=3) == 0
    rows = by_number(tmp_path / "parts")
    assert [row["trial"] for row in rows] == ["0", "1", "2"]
    assert rows[0] == first
    assert [parameters(row) for row in rows] == [
        parameters(row) for row in by_number(tmp_path / "whole")
    ]


def test_then_train_evaluates_the_test_set(tmp_path):
    more = ("--then-train", "--set", "steps=30")
    assert search(tmp_path, *more, total=1) == 0
    (run,) = tmp_path.glob("best-*")
    result = results.of_run(run)
    assert result["row"] == "reverse/tune"
    assert result["epochs"] > 2  # not the epochs of a trial
    assert 0 <= result["test"]["token_accuracy"] <= 1
    assert result["settings"]["training"]["epochs"] == 20


def test_a_study_in_a_journal(tmp_path):
    url = f"journal:///{tmp_path}/study.log"
    assert search(tmp_path / "a", "--storage", url, total=1) == 0
    assert search(tmp_path / "b", "--storage", url, total=2) == 0
    assert [row["trial"] for row in by_number(tmp_path / "b")] == ["0", "1"]


def process(*arguments):
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        [sys.executable, "-m", "fusedseq", *arguments],
        env=environment,
        stdout=subprocess.PIPE,
        text=True,
    )


def test_two_processes_share_a_study(tmp_path, capsys):
    """Together they run exactly the number of trials, and each runs some."""
    both = arguments(tmp_path, "--pruner", "none", total=6, epochs=3)
    other = process(*both)
    while other.poll() is None and not (tmp_path / "trials/tune-0000/steps.csv").exists():
        time.sleep(0.01)
    assert cli.main(both) == 0
    texts = [other.communicate()[0], capsys.readouterr().out]
    assert other.returncode == 0
    taken = [re.findall(r"^trial (\d) of 6", text, re.M) for text in texts]
    assert sorted(taken[0] + taken[1]) == list("012345")
    assert all(taken)
    rows = by_number(tmp_path)
    assert [row["trial"] for row in rows] == list("012345")


def test_the_last_process_concludes_the_study(tmp_path, monkeypatch, capsys):
    run_trial = searching.run_trial

    def meanwhile(*args):
        assert search(tmp_path, "--then-train", total=1) == 0
        assert "other processes are still running trials" in capsys.readouterr().out
        assert not list(tmp_path.glob("best-*"))
        return run_trial(*args)

    monkeypatch.setattr(searching, "run_trial", meanwhile)
    assert search(tmp_path, total=1) == 0
    text = capsys.readouterr().out
    assert "best: trial 0" in text
    assert "still running trials" not in text


# What happens to a trial.


def test_pruning_ends_a_trial_after_a_validation(tmp_path, monkeypatch):
    monkeypatch.setitem(
        trials.PRUNERS, "median", lambda: optuna.pruners.ThresholdPruner(upper=0, n_warmup_steps=1)
    )
    assert search(tmp_path, total=2, epochs=5) == 1  # no trial is complete
    rows = by_number(tmp_path)
    assert [(row["state"], row["epochs"]) for row in rows] == [("pruned", "2")] * 2
    assert not list(tmp_path.rglob("*.safetensors"))


def test_the_median_pruner_ends_trials_that_do_not_improve(tmp_path):
    assert search(tmp_path, total=8, epochs=3) == 0
    pruned = [row for row in table(tmp_path) if row["state"] == "pruned"]
    assert pruned
    assert {row["training.lr"] for row in pruned} == {"1e-09"}
    assert {row["epochs"] for row in pruned} <= {"2", "3"}


def test_a_trial_that_is_interrupted_as_it_is_pruned_stays_pruned(tmp_path, monkeypatch):
    monkeypatch.setitem(
        trials.PRUNERS, "median", lambda: optuna.pruners.ThresholdPruner(upper=0, n_warmup_steps=1)
    )
    original = searching.begin

    def begin(*args, on_validation, **options):
        def hook(number, metrics):
            if number == 1:
                os.kill(os.getpid(), signal.SIGINT)
            return on_validation(number, metrics)

        return original(*args, on_validation=hook, **options)

    with monkeypatch.context() as patch:
        patch.setattr(searching, "begin", begin)
        assert search(tmp_path, total=1, epochs=5) == 130
    assert search(tmp_path, total=1, epochs=5) == 1  # no trial is complete
    rows = by_number(tmp_path)
    assert [(row["state"], row["epochs"]) for row in rows] == [("failed", "2"), ("pruned", "2")]


@pytest.mark.parametrize("seed", [-1, 2**64 - 1])
def test_every_seed_of_the_command_line_draws_trials(tmp_path, seed):
    assert search(tmp_path, f"--seed={seed}", total=1, epochs=1) == 0


def test_a_loss_that_is_not_finite_fails_its_trial_alone(tmp_path):
    lr = ("--space", "lr=1e30,.01", "--space", "mask=true")
    assert search(tmp_path, *lr, total=2) == 0
    states = {row["training.lr"]: row for row in table(tmp_path)}
    assert states["1e+30"]["state"] == "failed"
    assert re.search("(loss|norm) (nan|inf) at step", states["1e+30"]["why"])
    assert states["0.01"]["state"] == "complete"
    assert len(table(tmp_path)) == 2


@pytest.mark.parametrize(
    "error", [torch.OutOfMemoryError("2 GiB"), MemoryError(), RuntimeError("can't allocate memory")]
)
def test_out_of_memory_fails_its_trial_alone(tmp_path, monkeypatch, error):
    original, calls = searching.begin, []

    def begin(*args, **options):
        calls.append(args)
        if len(calls) == 1:
            raise error
        return original(*args, **options)

    monkeypatch.setattr(searching, "begin", begin)
    assert search(tmp_path) == 0
    assert [row["state"] for row in by_number(tmp_path)] == ["failed", "complete"]


def test_a_full_disk_ends_the_study_and_loses_no_trial(tmp_path, monkeypatch, capsys):
    def full(*args, **options):
        raise TrainingError("the disk is full") from OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(searching, "begin", full)
        assert search(tmp_path) == 1
    assert "fusedseq tune: the disk is full" in capsys.readouterr().err
    assert search(tmp_path) == 0
    rows = by_number(tmp_path)
    assert [row["state"] for row in rows] == ["failed", "complete", "complete"]
    assert rows[0]["why"] == "its process ended, repeated as 1"
    assert parameters(rows[0]) == parameters(rows[1])


def test_an_interrupted_trial_continues_where_it_stopped(tmp_path, monkeypatch, capsys):
    with monkeypatch.context() as patch:
        interrupted_at(7, signal.SIGINT, patch)
        assert search(tmp_path / "cut", total=1, epochs=4) == 130
    assert "the same command continues" in capsys.readouterr().out
    assert search(tmp_path / "cut", total=1, epochs=4) == 0
    assert ", step 7, into" in capsys.readouterr().out
    assert search(tmp_path / "whole", total=1, epochs=4) == 0
    cut, whole = by_number(tmp_path / "cut"), by_number(tmp_path / "whole")
    assert (cut[1]["loss"], cut[1]["epochs"]) == (whole[0]["loss"], "4")
    assert cut[0]["why"] == "its process ended, repeated as 1"


def test_a_killed_trial_continues_in_the_next_process(tmp_path):
    more = ("--set", "save_steps=2")
    killed = process(*arguments(tmp_path, *more, total=1, epochs=40))
    steps = tmp_path / "trials/tune-0000/steps.csv"
    while killed.poll() is None and not (steps.exists() and steps.read_text().count("\n") > 60):
        time.sleep(0.01)
    killed.send_signal(signal.SIGKILL)
    assert killed.wait() == -signal.SIGKILL
    assert search(tmp_path, *more, total=1, epochs=40) == 0
    first, second = by_number(tmp_path)
    assert (first["state"], first["why"]) == ("failed", "its process ended, repeated as 1")
    assert (second["state"], second["epochs"]) == ("complete", "40")
    assert parameters(first) == parameters(second)
    assert search(tmp_path / "whole", *more, total=1, epochs=40) == 0
    assert float(second["loss"]) == float(table(tmp_path / "whole")[0]["loss"])


def study(out):
    return trials.Trials(f"sqlite:///{out}/study.db", "s", out, {"model.x": (1, 2)}, begun={})


def test_a_trial_that_always_ends_its_process_is_not_repeated_forever(tmp_path):
    run = study(tmp_path)
    for _ in range(1 + trials.RETRIES):
        with pytest.raises(ZeroDivisionError), run.take(1):
            raise ZeroDivisionError
    with run.take(1) as trial:
        assert trial is None
    assert len(run.taken()) == 1


def test_a_trial_that_comes_further_each_time_is_repeated(tmp_path):
    run = study(tmp_path)

    def fail_after(trial, validations):
        for number in range(validations):
            trial.report(1.0, number)
        raise ZeroDivisionError

    for validations in range(trials.RETRIES + 3):
        with pytest.raises(ZeroDivisionError), run.take(1) as trial:
            fail_after(trial, validations)
    with run.take(1) as trial:
        run.complete(trial, 1.0, {})
    assert run.best().value == 1.0


def test_parameters_that_do_not_fit_together_fail_their_trial_alone(tmp_path, capsys):
    assert search(tmp_path, "--space", "heads=3,2", total=4, epochs=1) == 0
    rows = table(tmp_path)
    assert {row["state"] for row in rows} == {"complete", "failed"}
    why = {row["why"] for row in rows if row["state"] == "failed"}
    assert why == {"model.heads must divide embedding = 16, got 3"}


def test_a_directory_whose_name_means_something_in_a_url(tmp_path):
    out = tmp_path / "a?b%41#c"
    assert search(out, total=1, epochs=1) == 0
    assert (out / "study.db").is_file()
    assert list(tmp_path.iterdir()) == [out]


def test_a_storage_that_fails_is_one_sentence(tmp_path, capsys, monkeypatch):
    def full(*_):
        raise optuna.exceptions.StorageInternalError("text") from OSError(28, "the disk is full")

    monkeypatch.setattr(trials.Trials, "take", full)
    assert search(tmp_path, total=1, epochs=1) == 1
    error = capsys.readouterr().err
    assert "the study could not be stored ([Errno 28] the disk is full)" in error
    assert error.count("\n") == 1


def test_no_trial_is_taken_twice_or_beyond_the_total(tmp_path):
    one, other = study(tmp_path), study(tmp_path)
    with one.take(2) as a, other.take(2) as b, other.take(2) as c:
        assert {a.number, b.number} == {0, 1}
        assert c is None
        assert trials._is_alive(one.all()[0])
        one.complete(a, 1.0, {})
        other.complete(b, 2.0, {})
    assert one.best().number == 0


def test_a_process_without_heartbeat_counts_as_dead(tmp_path, monkeypatch):
    one, other = study(tmp_path / "one"), study(tmp_path / "one")
    monkeypatch.setattr(trials, "MACHINE", "another")
    with one.take(2) as a:
        monkeypatch.setattr(trials, "MACHINE", "this")
        a.set_user_attr("beat", time.time() - trials.PATIENCE + 60)
        assert trials._is_alive(one.all()[0])
        a.set_user_attr("beat", time.time() - trials.PATIENCE - 1)
        with other.take(1) as b:
            assert (b.number, b.params) == (1, a.params)
            other.complete(b, 1.0, {})
        one.complete(a, 5.0, {})  # it was suspended: its result is dropped
    assert one.best().value == 1.0


def test_the_heartbeat_is_stored(tmp_path, monkeypatch):
    monkeypatch.setattr(trials, "BEAT", 0.01)
    run = study(tmp_path)
    with run.take(1) as trial:
        while "beat" not in run.all()[0].user_attrs:
            time.sleep(0.01)
        run.prune(trial)


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (("--trials", "0"), "--trials must be at least 1, got 0"),
        (("--storage", "nothing"), "--storage must be a URL such as sqlite:///FILE"),
        (
            ("--storage", "sqlite:////nowhere/at/all.db"),
            "--storage must be a URL such as .*unable to open",
        ),
        (
            ("--space", "model.hidden=1"),
            "--space: unknown key 'model.hidden'; known are model.embedding",
        ),
        (("--space", "heads"), "--space must be key=value,value,..., got 'heads'"),
        (("--space", "heads=many"), "model.heads must be a whole number, got 'many'"),
        (("--set", "embedding=2"), "--set: model.embedding is searched"),
        (("--study", "a/b"), "--study must be of letters"),
        (("--preset", "best"), "unknown preset 'best'; known are base, tuned"),
        (("--space", "training.epochs=1,3"), "training.epochs is that of --epochs in every trial"),
    ],
)
def test_errors_are_one_line(tmp_path, capsys, more, message):
    assert search(tmp_path, *more) == 2
    error = capsys.readouterr().err
    assert re.search(message, error), error
    assert error.count("\n") == 1


URLS = {
    "nothing": "ValueError|Could not parse",
    "sqlite:////nowhere/at/all.db": "unable to open",
    "journal:////nowhere/at/all.log": "nowhere",
    "postgresql://user:s3cret/@host:port/name": "postgresql://user:\\*\\*\\*@host:port/name",
    "oracle9://user:s3cret@host/name?password=s3cret": "password=\\*\\*\\*",
}


@pytest.mark.parametrize("url", URLS)
def test_a_bad_storage_leaves_nothing_behind_and_shows_no_password(tmp_path, capsys, url):
    assert search(tmp_path / "runs" / "new", "--storage", url) == 2
    out, error = capsys.readouterr()
    assert re.search(URLS[url], error), error
    assert "s3cret" not in out + error
    assert error.count("\n") == 1
    assert not list(tmp_path.iterdir())


def test_a_linked_directory_of_trials_is_refused(tmp_path, capsys):
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "steps.csv").write_text("precious")
    (tmp_path / "study" / "trials").mkdir(parents=True)
    (tmp_path / "study" / "trials" / "tune-0000").symlink_to(tmp_path / "elsewhere")
    assert search(tmp_path / "study", total=1, epochs=1) == 2
    assert "tune-0000 must be a directory, got a symbolic link" in capsys.readouterr().err
    assert (tmp_path / "elsewhere" / "steps.csv").read_text() == "precious"


def test_a_task_without_a_search_space_is_an_error(tmp_path, capsys):
    assert cli.main(["tune", "ptb", "--out", str(tmp_path)]) == 2
    assert "ptb has no search space of its own: give --space" in capsys.readouterr().err


def test_the_trials_of_a_study_have_the_same_data(tmp_path, capsys):
    assert search(tmp_path, total=1, epochs=1) == 0
    found = trials.Trials(f"sqlite:///{tmp_path}/other.db", "s", tmp_path, {"a.b": (1,)}, begun={})
    found.require_data(7)
    found.require_data(7)
    with pytest.raises(ValueError, match="whose checksum is 00000007, got 00000008"):
        found.require_data(8)


def test_a_study_continues_with_the_trials_of_an_uninterrupted_one(tmp_path, monkeypatch):
    more = "--sampler", "random"
    with monkeypatch.context() as patch:
        interrupted_at(3, signal.SIGINT, patch)
        assert search(tmp_path / "cut", *more, total=4, epochs=1) == 130
    assert search(tmp_path / "cut", *more, total=4, epochs=1) == 0
    assert search(tmp_path / "whole", *more, total=4, epochs=1) == 0
    cut, whole = (
        [parameters(row) for row in by_number(tmp_path / name) if row["state"] == "complete"]
        for name in ("cut", "whole")
    )
    assert cut == whole
    assert len(whole) == 4


def test_shared_settings_of_a_study_cannot_change(tmp_path, capsys):
    assert search(tmp_path, total=1, epochs=1) == 0
    for more, what in (
        ((), "--epochs 1, got 2"),
        (("--space", "heads=1"), r"--space model.heads \[1, 2\], got \[1\]"),
        (("--set", "batch=4"), "--epochs 1, got 2|data.batch 8, got 4"),
    ):
        assert search(tmp_path, *more, total=1) == 2
        assert re.search(
            f"study 'tune' was started with ({what}|--epochs 1, got 2)", capsys.readouterr().err
        )
