"""make gpu on a CPU: what fails keeps nothing else from being done and told, and the results stay small."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


def run(*command, **environment):
    return subprocess.run([sys.executable, *map(str, command)], cwd=ROOT, env={**os.environ, **environment}, text=True,
                          capture_output=True, timeout=300, check=False)  # fmt: skip


@pytest.fixture(scope="module")
def rehearsed(tmp_path_factory):
    """(the process, its folder, its result) of a rehearsal with a build and a benchmark that fail."""
    out = tmp_path_factory.mktemp("gpu") / "results"
    process = run(".ci/gpu.py", "--out", out, "--only", "build", "sanitizer", "tests", "bench-ceilings", "bench-memory",
                  "bench-losses", FUSEDSEQ_FAKE_GPU="build,bench-losses")  # fmt: skip
    return process, out, json.loads((out / "rehearsal-cpu.json").read_text())


def test_what_fails_is_told_and_the_rest_is_done(rehearsed):
    process, _, result = rehearsed
    parts = {part["name"]: part["what"] for part in result["parts"]}
    assert parts == {"build": "FAILED: exit code 1", "nvidia-smi": "skipped: a rehearsal", "bench-ceilings": "done",
                     "tests": "done", "sanitizer": "skipped: a rehearsal", "bench-memory": "done", "bench-losses": "FAILED: exit code 1"}  # fmt: skip
    assert process.returncode == 1
    assert "make gpu: failed: build, bench-losses; " in process.stdout


def test_the_rest_is_in_the_results(rehearsed):
    _, out, result = rehearsed
    assert result["ceilings"]["copy"] > 0
    assert {row["op"] for row in result["rows"]} >= {
        "locked_dropout",
        "weight_drop",
        "embedding",
        "residual_layer_norm",
    }
    assert all(times["call"]["median"] > 0 for row in result["rows"] for times in row["times"].values())
    tests = json.loads((out / "rehearsal-cpu-tests.json").read_text())
    assert tests["passed"] == tests["collected"] > 0
    assert "build: made to fail" in (out / "rehearsal-cpu-log.txt").read_text()
    table = (out / "rehearsal-cpu.md").read_text()
    assert "| lstm-T70-B20-650-650-weight_drop0.5-bfloat16 |" in table  # of a group that did not run
    assert "bars met, " in table
    assert "MISSED" not in table  # sizes of a rehearsal pass no judgement


def test_results_are_few_and_small(rehearsed):
    files = list(rehearsed[1].iterdir())
    assert len(files) <= 8
    assert all(file.is_file() and 0 < file.stat().st_size < 16 << 20 for file in files)


@pytest.fixture
def gpu(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / ".ci")
    import gpu

    return gpu


def running(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2][0] != "Z"
    except OSError:
        return False


def test_a_part_that_hangs_is_ended_with_all_it_started(gpu, tmp_path):
    script = f"sleep 60 & echo $! > {tmp_path / 'child'}; wait"
    assert gpu.execute(("sh", "-c", script), tmp_path / "log", 1.0, dict(os.environ)) == "FAILED: not in time"
    child = int((tmp_path / "child").read_text())
    for _ in range(100):  # a killed process may take a moment to go
        if not running(child):
            break
        time.sleep(0.1)
    assert not running(child)
    assert gpu.execute(("no such program",), tmp_path / "log", 1.0, {}).startswith("FAILED: ")


def test_logs_are_cut_in_the_middle(gpu, tmp_path, monkeypatch):
    monkeypatch.setattr(gpu, "LARGEST", 1000)
    for name in "ab":
        (tmp_path / f"{name}.txt").write_text(f"first {'é' * 5000} last")
    text = gpu.logs(tmp_path, "*.txt")
    assert len(text.encode()) < 1100
    assert text.count("first") == text.count("last") == text.count("... cut ...") == 2


PLANTED = """
import os, time
def test_planted_good(): pass
def test_planted_crash(): os._exit(7)
def test_planted_wrong(): assert 1 == 2
def test_planted_hang(): time.sleep(600)
def test_planted_last(): pass
"""


def test_tests_go_on_behind_one_that_crashes_or_hangs(tmp_path):
    planted = tmp_path / "test_planted.py"
    planted.write_text(PLANTED)
    # A file of ours is named for its conftest.py.
    process = run(".ci/gpu_tests.py", "--device=cpu", f"--out={tmp_path}", "--shards=1", "--hang=12", "--seconds=240",
                  "tests/test_isa.py", planted, "-k", "planted", PYTHONPATH=str(ROOT / "pyext"))  # fmt: skip
    found = json.loads((tmp_path / "tests.json").read_text())
    assert {name: found[name] for name in ("collected", "passed", "failed", "crashed", "hung", "not reached")} == {
        "collected": 5, "passed": 2, "failed": 1, "crashed": 1, "hung": 1, "not reached": 0}, process.stdout  # fmt: skip
    assert process.returncode == 1
    assert [line["test"].rpartition("_")[2] for line in found["failures"]] == ["crash", "wrong", "hang"]
