"""What `fusedseq train` refuses to do with the directory of a run, and what it says instead."""

import subprocess

import pytest
from fusedseq import cli
from fusedseq.tasks.training import TrainingError
from fusedseq.tasks.training.failures import explained

TINY = ("embedding=8", "hidden=8", "layers=1", "batch=40", "bptt=20", "rounds=0")


def train(out, *more):
    return cli.main(
        ["train", "ptb", "--data", "synthetic", "--skip-test", "--out", str(out), *more]
    )


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A finished run of 3 steps, for copies."""
    out = tmp_path_factory.mktemp("runs") / "finished"
    sets = [word for change in TINY for word in ("--set", change)]
    assert train(out, "--steps", "3", *sets) == 0
    return out


@pytest.fixture
def run(finished, tmp_path):
    out = tmp_path / "run"
    subprocess.run(["cp", "-r", str(finished), str(out)], check=True)
    return out


def contents(run):
    return {path.name: path.read_bytes() for path in run.iterdir() if path.is_file()}


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--steps", "2"], "training.steps must be at least 3, which the run in"),
        (["--epochs", "0"], "training.epochs must be at least 1, which the run in"),
    ],
)
def test_a_run_does_not_become_shorter(run, more, message, capsys):
    before = contents(run)
    assert train(run, "--resume", *more) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.endswith(f"has already reached, got {more[1]}\n")
    assert contents(run) == before
    assert train(run, "--resume", "--steps", "3") == 0


def test_a_run_whose_best_weights_are_newer_than_its_checkpoint_does_not_become_shorter(
    tmp_path, capsys
):
    """As after a kill between the two files of an epoch's end."""
    sets = [word for change in TINY for word in ("--set", change)]
    assert train(tmp_path, "--epochs", "1", *sets) == 0
    before = (tmp_path / "last.safetensors").read_bytes()
    assert train(tmp_path, "--resume", "--epochs", "2") == 0
    capsys.readouterr()
    (tmp_path / "last.safetensors").write_bytes(before)
    assert train(tmp_path, "--resume", "--epochs", "1") == 2
    assert "training.epochs must be at least 2, which the run" in capsys.readouterr().err
    assert train(tmp_path, "--resume", "--epochs", "2") == 0


def test_a_run_without_a_checkpoint_is_started_by_its_preset_alone(tmp_path, capsys):
    assert train(tmp_path, "--resume", "--steps", "1") == 2
    error = capsys.readouterr().err
    assert f"--resume: there is no checkpoint in {tmp_path}: start the run with --preset" in error
    sets = [word for change in TINY for word in ("--set", change)]
    assert train(tmp_path, "--resume", "--steps", "1", *sets) == 0


@pytest.mark.parametrize("left", ["best.safetensors", "result.json"])
@pytest.mark.parametrize("options", [[], ["--resume"], ["--resume", "--preset", "lstm"]])
def test_a_finished_run_without_its_last_checkpoint_is_not_replaced(run, left, options, capsys):
    for name in {"last.safetensors", "best.safetensors", "result.json"} - {left}:
        (run / name).unlink()
    before = contents(run)
    assert train(run, "--steps", "1", *options) == 2
    assert f"{run} already holds a run: it has {left}, but no last" in capsys.readouterr().err
    assert contents(run) == before


def test_a_run_without_its_best_weights_is_refused_before_it_is_trained(tmp_path, capsys):
    sets = [word for change in (*TINY, "eval_steps=2") for word in ("--set", change)]
    assert train(tmp_path, "--steps", "3", *sets) == 0
    (tmp_path / "best.safetensors").unlink()
    before = contents(tmp_path)
    assert train(tmp_path, "--resume", "--steps", "9") == 2
    assert "best.safetensors does not exist" in capsys.readouterr().err
    assert contents(tmp_path) == before


def test_settings_whose_checkpoint_could_not_be_loaded_are_refused(tmp_path, capsys):
    sizes = ",".join(["4"] * 101)
    out = ["--out", str(tmp_path / "run")]
    assert cli.main(["train", "reverse", *out, "--set", f"data.sizes={sizes}"]) == 2
    assert "data.sizes must be at most 100 numbers" in capsys.readouterr().err


def test_a_failure_names_a_checkpoint_that_exists(tmp_path):
    last = tmp_path / "last.safetensors"

    def message():
        with pytest.raises(TrainingError) as failure, explained(lambda: "step 1", last):
            raise MemoryError
        return str(failure.value)

    assert "training stopped, there is no checkpoint yet; try" in message()
    last.touch()
    assert f"training stopped, the last checkpoint is {last}; try" in message()


def test_an_out_that_is_a_file_is_refused(tmp_path, capsys):
    (tmp_path / "file").touch()
    out = ["--out", str(tmp_path / "file")]
    for command in (
        ["train", "ptb", "--data", "synthetic"],
        ["grid", "en-fr", "--data", "synthetic"],
        ["ensemble", "words", "--data", "synthetic"],
    ):
        assert cli.main([*command, *out]) == 2
        error = capsys.readouterr().err
        assert f"--out must be a directory, got a regular file: {tmp_path / 'file'}" in error


@pytest.mark.parametrize("seed", [2**64, -(2**63) - 1])
@pytest.mark.parametrize("command", [["train", "ptb"], ["generate", "run"], ["tune", "ptb"]])
def test_a_seed_out_of_range_is_named(command, seed, capsys):
    with pytest.raises(SystemExit) as exit:
        cli.main([*command, f"--seed={seed}"])
    assert exit.value.code == 2
    error = capsys.readouterr().err
    assert f"--seed: must be from -2^63 to 2^64 - 1, got {seed}" in error


def test_the_directory_of_other_data_is_named(run, tmp_path, monkeypatch, capsys):
    for split in ("train", "valid", "test"):
        (tmp_path / f"{split}.txt").write_text("the dog sees a cat\n" * 50)
    monkeypatch.setenv("FUSEDSEQ_DATA", str(tmp_path))
    assert cli.main(["eval", "ptb", str(run)]) == 2
    error = capsys.readouterr().err
    assert "ptb: --data must be the data that the checkpoint was trained on, with checksum" in error
    assert f", got the data in {tmp_path}, with checksum " in error
