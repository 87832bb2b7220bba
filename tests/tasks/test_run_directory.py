"""The directory of a run: its lock, links and special files in it, signals, a full disk."""

import contextlib
import errno
import json
import math
import os
import pty
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from fusedseq import cli
from fusedseq.tasks.evaluation import translation_options
from fusedseq.tasks.experiments.results import validations
from fusedseq.tasks.runs.result import read_result
from fusedseq.tasks.training import (
    Trainer,
    TrainingSettings,
    files,
    load_checkpoint,
    plots,
    save_checkpoint,
)
from fusedseq.tasks.training.lock import LOCK, locked, new_directory, run_directory, try_lock
from fusedseq.tasks.training.log import Log
from fusedseq.tasks.training.processes import Processes

from tests.support.toy_task import Toy

ARGUMENTS = "train ptb --data synthetic --ops reference --skip-test"
TINY = ("embedding=8", "hidden=8", "layers=1", "batch=40", "bptt=20", "rounds=0", "save_steps=4")


def train(out, *more):
    sets = [word for change in TINY for word in ("--set", change)]
    return cli.main([*ARGUMENTS.split(), "--out", str(out), *sets, *more])


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A finished run, for copies."""
    out = tmp_path_factory.mktemp("runs") / "finished"
    assert train(out, "--steps", "3") == 0
    return out


@pytest.fixture
def run(finished, tmp_path):
    out = tmp_path / "run"
    subprocess.run(["cp", "-r", str(finished), str(out)], check=True)
    return out


# The lock.


def test_a_second_run_into_a_directory_is_refused(run, capsys):
    before = {path: path.read_bytes() for path in run.iterdir() if path.is_file()}
    with locked(run / LOCK):
        for more in (["--resume", "--steps", "9"], []):
            assert train(run, *more) == 2
            error = capsys.readouterr().err
            assert f"another process is working on the run in {run}: wait until" in error
            assert error.count("\n") == 1
    assert {path: path.read_bytes() for path in run.iterdir() if path.is_file()} == before
    assert train(run, "--resume", "--steps", "4") == 0


def test_the_lock_is_held_to_the_end_of_the_test_evaluation(tmp_path, monkeypatch):
    held = []
    from fusedseq.tasks.commands import train as command

    def report(*_):
        with try_lock(tmp_path / "run" / LOCK) as free:
            held.append(not free)

    monkeypatch.setattr(command, "report", report)
    assert train(tmp_path / "run", "--steps", "1") == 0
    assert held == [True]


def test_the_lock_of_a_killed_process_is_free(tmp_path):
    code = (
        "import sys, time\nfrom fusedseq.tasks.training.lock import try_lock\n"
        "with try_lock(sys.argv[1]) as ours:\n    print(ours, flush=True)\n    time.sleep(600)"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    process = subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path / LOCK)],
        env=environment,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout.readline() == "True\n"
    with try_lock(tmp_path / LOCK) as ours:
        assert not ours
    process.kill()
    process.wait()
    assert (tmp_path / LOCK).exists()
    with try_lock(tmp_path / LOCK) as ours:
        assert ours


def test_two_trainers_do_not_write_into_one_directory(tmp_path):
    """Training from Python takes the lock too, and releases it; the command takes it once."""
    trainer = Trainer(Toy(), TrainingSettings(steps=2, epochs=None, lr=0.1), tmp_path)
    with (
        locked(tmp_path / LOCK),
        pytest.raises(ValueError, match="another process is working on the run"),
    ):
        trainer.fit()
    assert [path.name for path in tmp_path.iterdir()] == [LOCK]

    held = []

    def on_validation(*_):
        with try_lock(tmp_path / LOCK) as free:
            held.append(not free)

    settings = TrainingSettings(epochs=1, lr=0.1)
    Trainer(Toy(), settings, tmp_path, on_validation=on_validation).fit()
    assert held == [True]
    with try_lock(tmp_path / LOCK) as free:
        assert free


def test_a_lock_that_this_process_holds_for_another_run_is_not_taken_again(tmp_path):
    with (
        run_directory(tmp_path / "one", Processes()),
        run_directory(tmp_path / "one", Processes()),
        run_directory(tmp_path / "two", Processes()),
    ):
        for name in ("one", "two"):
            with try_lock(tmp_path / name / LOCK) as free:
                assert not free
            (tmp_path / name / "steps.csv").touch()
    for name in ("one", "two"):
        with try_lock(tmp_path / name / LOCK) as free:
            assert free


class Refused(Processes):
    """The second process of a run whose first one was refused the lock."""

    def from_first(self, function):
        return True


def test_every_process_of_a_refused_run_says_so(tmp_path):
    with (
        pytest.raises(ValueError, match="another process is working on the run"),
        run_directory(tmp_path / "run", Refused(1, 2)),
    ):
        pass
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("wrong", [["--data", "nowhere"], ["--preset", "nope"]])
def test_a_mistake_leaves_no_directory(wrong, tmp_path, capsys):
    assert train(tmp_path / "runs" / "new", *wrong) == 2
    assert not list(tmp_path.iterdir())


def test_only_what_was_created_is_removed(tmp_path):
    (tmp_path / "old").mkdir()
    for path in (tmp_path / "old", tmp_path / "new" / "deep", tmp_path / "used"):
        with pytest.raises(KeyError), new_directory(path):
            raise KeyError((path / "steps.csv").touch() if path.name == "used" else None)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["old", "used"]


# Links and special files.

WRITTEN = (
    "steps.csv",
    "epochs.csv",
    "last.safetensors",
    "best.safetensors",
    "result.json",
    "README.md",
    "loss.png",
)


@pytest.mark.parametrize("make", [os.symlink, os.link], ids=["symbolic", "hard"])
def test_nothing_is_written_through_a_link(run, tmp_path, make):
    victims = {}
    for name in WRITTEN:
        victim = tmp_path / f"victim of {name}"
        victim.write_bytes((run / name).read_bytes() if (run / name).exists() else b"precious")
        (run / name).unlink(missing_ok=True)
        make(victim, run / name)
        victims[victim] = victim.read_bytes()
    # The names under which files were once written before they were renamed.
    for name in ("steps.tmp", "epochs.tmp"):
        victim = tmp_path / f"victim of {name}"
        victim.write_text("precious")
        os.symlink(victim, run / name)
        victims[victim] = b"precious"
    assert train(run, "--resume", "--epochs", "1", "--set", "steps=none") == 0
    assert {victim: victim.read_bytes() for victim in victims} == victims
    for name in WRITTEN:
        assert not (run / name).is_symlink()
        assert (run / name).stat().st_nlink == 1
    assert not list(run.glob(files.TEMPORARY))


def test_a_dangling_link_creates_nothing(run, tmp_path, capsys):
    for name in (LOCK, "result.json", "loss.png"):
        (run / name).unlink(missing_ok=True)
        os.symlink(tmp_path / "created", run / name)
    assert train(run, "--resume", "--steps", "4") == 2
    assert f"{run / LOCK} must be a regular file, got a symbolic link" in capsys.readouterr().err
    (run / LOCK).unlink()
    assert train(run, "--resume", "--steps", "4") == 0
    assert not (tmp_path / "created").exists()


def test_a_linked_tensorboard_directory_is_refused(run, tmp_path, capsys):
    subprocess.run(["rm", "-r", str(run / "tensorboard")], check=True)
    (tmp_path / "elsewhere").mkdir()
    os.symlink(tmp_path / "elsewhere", run / "tensorboard")
    assert train(run, "--resume", "--steps", "4") == 2
    assert "tensorboard must be a directory, got a symbolic link" in capsys.readouterr().err
    assert not list((tmp_path / "elsewhere").iterdir())


@pytest.mark.parametrize("name", [LOCK, "last.safetensors", "steps.csv", "epochs.csv"])
def test_a_fifo_is_refused_by_name(run, name, capsys):
    (run / name).unlink()
    os.mkfifo(run / name)
    assert train(run, "--resume", "--steps", "4") == 2
    error = capsys.readouterr().err
    assert f"{run / name} must be a regular file, got a FIFO" in error
    assert error.count("\n") == 1


def test_a_fifo_in_place_of_a_result_is_refused_by_name(run, capsys):
    (run / "result.json").unlink()
    os.mkfifo(run / "result.json")
    assert train(run, "--resume", "--steps", "4") == 2
    assert "result.json must be a regular file, got a FIFO" in capsys.readouterr().err


def test_a_device_is_refused(tmp_path):
    os.symlink("/dev/zero", tmp_path / "link")
    for path in (Path("/dev/zero"), tmp_path / "link"):
        with pytest.raises(ValueError, match="must be a regular file, got a device"):
            files.read_text(path)
        with pytest.raises(ValueError, match="must be a regular file, got a device"):
            files.write_json(path, {})
    assert (tmp_path / "link").is_symlink()


def test_a_link_to_an_open_file_is_refused(tmp_path):
    """As /dev/stdout is one of a command whose output goes to a file."""
    with open(tmp_path / "out", "w") as out:
        os.symlink(f"/proc/self/fd/{out.fileno()}", tmp_path / "stdout")
        os.symlink("stdout", tmp_path / "link")
        for name in ("stdout", "link"):
            with pytest.raises(
                ValueError, match="must be a regular file, got one of /dev or /proc"
            ):
                files.write_json(tmp_path / name, {})
            assert (tmp_path / name).is_symlink()


def test_a_file_is_replaced_as_a_whole_or_not_at_all(tmp_path):
    path = tmp_path / "file"
    files.write_json(path, {"a": 1})
    with pytest.raises(KeyError), files.replaced(path) as file:
        raise KeyError(file.write("half"))
    assert json.loads(path.read_text()) == {"a": 1}
    assert [p.name for p in tmp_path.iterdir()] == ["file"]
    mask = os.umask(0)
    os.umask(mask)
    assert path.stat().st_mode & 0o777 == 0o666 & ~mask


# Damage and a full disk.


@pytest.mark.parametrize(
    "text",
    ["", "{", "[1]", "\xff", "[" * 100_000, '{"task": "ptb"}', "1" * 5000],
    ids=["empty", "cut", "list", "binary", "deep", "keys", "long"],
)
def test_a_damaged_result_names_its_file(tmp_path, text, capsys):
    (tmp_path / "result.json").write_bytes(text.encode("latin-1"))
    assert cli.main(["list", "--runs", str(tmp_path)]) == 2
    error = capsys.readouterr().err
    assert f"{tmp_path / 'result.json'} is damaged" in error
    assert error.count("\n") == 1


@pytest.mark.parametrize(
    "key", ["task", "settings", "valid", "data", "seconds", "parameters", "machine", "versions"]
)
def test_a_result_without_one_of_its_parts_is_damaged(run, tmp_path, key):
    result = json.loads((run / "result.json").read_text())
    for damaged in (result | {key: None}, {k: v for k, v in result.items() if k != key}):
        (tmp_path / "result.json").write_text(json.dumps(damaged))
        with pytest.raises(ValueError, match=rf"result\.json is damaged: {key} must be"):
            read_result(tmp_path / "result.json")


def test_a_result_without_the_name_of_its_data_is_damaged(run, tmp_path):
    result = json.loads((run / "result.json").read_text())
    (tmp_path / "result.json").write_text(json.dumps(result | {"data": {"fingerprint": 1}}))
    with pytest.raises(ValueError, match="data must have a name and a fingerprint"):
        read_result(tmp_path / "result.json")


def test_a_damaged_log_names_its_file(run, capsys):
    (run / "steps.csv").write_bytes(b"step\n\xff\n")
    assert train(run, "--resume", "--steps", "4") == 2
    assert f"{run / 'steps.csv'} is damaged" in capsys.readouterr().err


def full(*_, **__):
    raise OSError(errno.ENOSPC, "No space left on device")


def test_a_full_disk_at_the_plots_does_not_lose_the_evaluation(tmp_path, monkeypatch, capsys):
    from matplotlib.figure import Figure

    monkeypatch.setattr(Figure, "savefig", full)
    assert train(tmp_path / "run", "--epochs", "1", "--set", "bptt=70") == 0
    assert "no plots: " in (out := capsys.readouterr().out)
    assert "loss.png" in out
    assert "valid" in json.loads((tmp_path / "run" / "result.json").read_text())
    assert not list((tmp_path / "run").glob(files.TEMPORARY))


def test_numbers_that_json_does_not_have_are_written_as_null(tmp_path):
    parts = {"list": [math.nan, 1.5], "tuple": (math.inf, {"inner": -math.inf}), "text": "nan"}
    files.write_json(tmp_path / "result.json", parts)
    found = json.loads((tmp_path / "result.json").read_text())
    assert found == {"list": [None, 1.5], "tuple": [None, {"inner": None}], "text": "nan"}


def test_a_full_disk_while_a_file_is_written_names_it(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left") as error:
        files.write_json(tmp_path / "result.json", {})
    assert error.value.filename == str(tmp_path / "result.json")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("line", ["1,abc", "1", "1,2,3"])
def test_a_damaged_table_of_epochs_names_its_file(tmp_path, line):
    (tmp_path / "epochs.csv").write_text(f"step,train_loss\n{line}\n")
    with pytest.raises(ValueError, match=r"epochs\.csv is damaged"):
        validations(tmp_path)


def test_damaged_curves_are_named(tmp_path):
    (tmp_path / "epochs.csv").write_text("step,train_loss\n1,abc\n")
    with pytest.raises(ValueError, match=r"epochs\.csv is damaged"):
        plots.plot(tmp_path)


def test_a_line_that_was_not_written_to_its_end_is_left_out(tmp_path):
    """The line's only cell, 12, is the beginning of a larger number of steps."""
    table = tmp_path / "steps.csv"
    table.write_text("step,epoch,loss\n1000,0,1.5\n1001,0,1.25\n12")
    with Log(tmp_path, "points", 1000) as log:
        log.start_epoch(0, 1000, 2000)
        log.train([(1001, 0, 1.0, 0.1, None, 8)])
    lines = table.read_text().splitlines()
    assert lines[:2] == ["step,epoch,loss", "1000,0,1.5"]
    assert [line.split(",")[0] for line in lines[2:]] == ["1001"]


# Signals and clocks.


def test_a_clock_that_stands_still_has_no_speed(tmp_path, monkeypatch):
    monkeypatch.setattr(time, "perf_counter", lambda: 5.0)
    with Log(tmp_path, "points", 0) as log:
        log.start_epoch(0, 0, 1)
        assert log.train([(1, 0, 0.5, 0.1, None, 8)]) == 0.0
    assert (tmp_path / "steps.csv").read_text().splitlines()[1] == "1,0,0.5,0.1,,8,"


def signalled(out, number):
    run = Trainer(Toy(), TrainingSettings(epochs=1000, lr=0.1), out)
    step = run._train

    def interrupt(batches):
        step(batches)
        if run.step == 3:
            os.kill(os.getpid(), number)

    run._train = interrupt
    return run


@pytest.fixture
def terminal_signals():
    """SIGHUP has its default effect, although the tests may run under nohup."""
    previous = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, previous)


@pytest.mark.usefixtures("terminal_signals")
def test_sighup_ends_a_run_like_sigterm(tmp_path):
    for number in (signal.SIGTERM, signal.SIGHUP):
        assert signalled(tmp_path / str(number), number).fit() == "interrupted"
        state = load_checkpoint(tmp_path / str(number) / "last.safetensors")
        assert state["position"]["step"] == 3


def test_sighup_stays_ignored_under_nohup(tmp_path):
    previous = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        run = signalled(tmp_path, signal.SIGHUP)
        run.settings = TrainingSettings(epochs=1000, steps=5)
        assert run.fit() == "steps"
    finally:
        signal.signal(signal.SIGHUP, previous)


@pytest.mark.usefixtures("terminal_signals")
def test_a_run_whose_terminal_ends_is_saved(tmp_path):
    code = (
        "import sys\nfrom pathlib import Path\n"
        "from fusedseq.tasks.training import Trainer, TrainingSettings\n"
        "from tests.support.toy_task import Toy\n"
        "out = Path(sys.argv[1])\n"
        "run = Trainer(Toy(), TrainingSettings(epochs=10**9, lr=.1, save_steps=None), out)\n"
        "why = run.fit()\nprint(why, flush=True)\n(out / 'ended').write_text(why)\n"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([*sys.path, os.getcwd()])}
    child, terminal = pty.fork()
    if child == 0:
        os.execve(sys.executable, [sys.executable, "-c", code, str(tmp_path)], environment)
    steps = tmp_path / "steps.csv"
    while not (steps.exists() and steps.read_text().count("\n") > 5):
        os.set_blocking(terminal, False)
        with contextlib.suppress(BlockingIOError):
            os.read(terminal, 1 << 16)
        time.sleep(0.02)
    os.close(terminal)
    assert os.waitpid(child, 0)[1] == 0
    assert (tmp_path / "ended").read_text() == "interrupted"
    assert load_checkpoint(tmp_path / "last.safetensors")["position"]["step"] >= 5


def test_stale_temporary_files_are_removed(tmp_path):
    save_checkpoint(tmp_path / "c", {})
    (tmp_path / ".c.0123.tmp").touch()
    (tmp_path / ".directory.tmp").mkdir()
    Trainer(Toy(), TrainingSettings(steps=1, epochs=None), tmp_path).fit()
    assert {path.name for path in tmp_path.glob(files.TEMPORARY)} == {".directory.tmp"}


def test_a_table_that_cannot_be_written_is_refused_before_the_translation(tmp_path):
    os.mkfifo(tmp_path / "table.csv")
    with pytest.raises(ValueError, match="must be a regular file, got a FIFO"):
        translation_options.check_writable(tmp_path / "table.csv")
    translation_options.check_writable(tmp_path / "new.csv")


def test_a_full_disk_names_a_file_that_is_smaller_than_the_buffer(tmp_path):
    """Its bytes are written when it is closed."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10, limits[1]))
    try:
        with pytest.raises(OSError, match="File too large") as error:
            files.write_json(tmp_path / "result.json", {"a": "b" * 100})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert error.value.filename == str(tmp_path / "result.json")
