"""`make gpu-train` on a CPU: a resumed run is bit for bit the run without interruption."""

import csv
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tools.gpu.checkpoint_pieces import pack, unpack
from tools.gpu.train import UNFINISHED

ROOT = Path(__file__).parents[2]

SETTINGS = (
    "model.embedding=8",
    "model.hidden=8",
    "data.batch=4",
    "training.save_steps=20",
    "training.stop_after=none",
    "training.epochs=100000",
)
TINY_MODEL = [word for setting in SETTINGS for word in ("--set", setting)]
NAME = "ptb-lstm"


@pytest.fixture
def run(tmp_path):
    """A run's directory: a checkpoint, a finished configuration, and files that nobody needs."""
    folder = tmp_path / "run"
    (folder / "done").mkdir(parents=True)
    for name, data in {
        "last.safetensors": os.urandom(5000),
        "epochs.csv": b"step\n1\n",
        "done/result.json": b"{}",
        "done/last.safetensors": os.urandom(99),
        ".lock": b"",
        "a.tmp": b"x",
    }.items():
        (folder / name).write_bytes(data)
    return folder


def with_checksums(folder, pieces, name="run"):
    (folder / f"{name}.json").write_text(json.dumps({"pieces": pieces}))
    return folder


def test_a_run_is_restored_from_its_pieces(run, tmp_path):
    pieces = pack(run, tmp_path / "shards", "run", size=1024)
    assert len(pieces) > 4
    assert all(path.stat().st_size <= 1024 for path in (tmp_path / "shards").iterdir())
    assert pack(run, tmp_path / "again", "run", size=1024) == pieces
    missing = unpack(
        with_checksums(tmp_path / "shards", pieces), tmp_path / "arriving", tmp_path / "out", "run"
    )
    assert missing == []
    files = {
        str(path.relative_to(tmp_path / "out"))
        for path in (tmp_path / "out").rglob("*")
        if path.is_file()
    }
    assert files == {"last.safetensors", "epochs.csv", "done/result.json"}
    assert (tmp_path / "out/last.safetensors").read_bytes() == (
        run / "last.safetensors"
    ).read_bytes()


def test_pieces_arrive_one_by_one_and_a_damaged_one_is_rejected(run, tmp_path):
    pieces = pack(run, tmp_path / "shards", "run", size=1024)
    first, *others = pieces
    for number, piece in enumerate([*others, first]):
        copied = tmp_path / f"copied-{number}"
        copied.mkdir()
        data = (tmp_path / "shards" / piece).read_bytes()
        (copied / piece).write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
        with pytest.raises(ValueError, match=f"{piece} is not the piece that run.json lists"):
            unpack(with_checksums(copied, pieces), tmp_path / "arriving", tmp_path / "out", "run")
        (copied / piece).write_bytes(data)
        missing = unpack(copied, tmp_path / "arriving", tmp_path / "out", "run")
        assert missing == [p for p in pieces if p not in [*others, first][: number + 1]]
        assert (tmp_path / "out").exists() == (missing == [])


def train(work, out, *more, minutes=2.0):
    command = (
        sys.executable,
        "-m",
        "tools.gpu.train",
        "--run",
        "ptb/lstm",
        "--data",
        "synthetic",
        "--work",
        work,
        "--out",
        out,
        "--minutes",
        minutes,
        *more,
    )
    process = subprocess.run(
        [*map(str, command)],
        cwd=ROOT,
        text=True,
        capture_output=True,
        check=False,
        env={**os.environ, "FUSEDSEQ_FAKE_GPU": "1", "OMP_NUM_THREADS": "1"},
    )
    state = out / f"{NAME}.json"
    return process, json.loads(state.read_text()) if state.exists() else None


def losses(folder):
    with (folder / NAME / "steps.csv").open(newline="") as file:
        return [(row["step"], row["loss"]) for row in csv.DictReader(file)]


def test_an_interrupted_run_resumes_elsewhere_bit_for_bit(tmp_path):
    process, state = train(
        tmp_path / "first", tmp_path / "out", *TINY_MODEL, "--steps", "1000000", minutes=0.5
    )
    assert process.returncode == UNFINISHED, process.stdout + process.stderr
    assert (state["what"], state["part"], state["parts"]) == ("more", 1, 1)
    assert state["on this machine"] == "make gpu-train RUN=ptb/lstm, with the same DATA and ARGS"
    files = sorted(path.name for path in (tmp_path / "out").iterdir())
    assert {f"{NAME}.000", f"{NAME}.json", f"{NAME}-log.txt"} <= {*files}
    assert len(files) <= 8

    done = len(losses(tmp_path / "first"))
    end = ("--steps", str(done + 5))
    process, state = train(
        tmp_path / "second", tmp_path / "out-2", *TINY_MODEL, *end, "--from", tmp_path / "out"
    )
    assert process.returncode == 0, process.stdout + process.stderr
    assert (state["what"], state["pieces"]) == ("done", {})
    assert json.loads((tmp_path / f"out-2/{NAME}-result.json").read_text())["steps"] == done + 5
    process, _ = train(tmp_path / "whole", tmp_path / "out-3", *TINY_MODEL, *end)
    assert process.returncode == 0
    assert losses(tmp_path / "second") == losses(tmp_path / "whole")

    # Nothing is left to do.
    process, state = train(tmp_path / "second", tmp_path / "out-4", *TINY_MODEL, *end, minutes=0)
    assert (process.returncode, state["what"]) == (0, "done")


def test_failures_are_reported(tmp_path):
    process, _ = train(tmp_path / "work", tmp_path / "out", "--run", "ptb/nothing")
    assert process.returncode == 2
    assert "RUN must be one of words/base, " in process.stderr
    process, state = train(tmp_path / "work", tmp_path / "out", "--set", "model.nothing=1")
    assert (process.returncode, state["what"]) == (1, "failed")
    assert "model.nothing" in (tmp_path / f"out/{NAME}-log.txt").read_text()
