"""make gpu on a CPU: what fails keeps nothing else from being done and told, and the results stay small."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from bench import gpu_cases, gpu_report

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


def test_every_bar_stands_without_a_result():
    bars = sum(len(case.bars) for case in gpu_cases.listed())
    text = gpu_report.markdown({})
    assert text.count(": not measured") == bars > 30
    assert f"0 of {bars} bars met, {bars} not measured" in text


@pytest.mark.parametrize(
    ("bar", "found", "met"),
    [
        (gpu_cases.Bar("eager", 5), "4.00×", False),
        (gpu_cases.Bar("eager", 5, "call"), "6.00×", True),
        (gpu_cases.Bar("best of eager, torch, flex", 2), "2.00× (torch)", True),
        (gpu_cases.Bar("us per step", 25), "20", True),
        (gpu_cases.Bar("us", 1000), "1400", False),
        (gpu_cases.Bar("torch", 1, "cold"), "", None),
    ],
    ids=str,
)
def test_a_bar_is_judged(bar, found, met):
    case = gpu_cases.listed()[0]
    milliseconds = {"fused": {"graph": 1.4, "call": 2}, "eager": {"graph": 5.6, "call": 12}, "torch": {"graph": 2.8}}
    row = {"times": {name: {way: {"median": ms / 1e3} for way, ms in by.items()} for name, by in milliseconds.items()}}
    assert gpu_report.verdict(bar, case, row, {"copy": 4e12})[1:] == (found, met)


def test_a_copy_is_judged_by_the_cards_own():
    case = next(case for case in gpu_cases.listed() if case.row.op == "locked_dropout")
    seconds = case.row.traffic * 2 / 4e12  # bf16, at the rate of a copy
    row = {"times": {"fused": {"cold": {"median": seconds / 0.8}}}}
    assert gpu_report.verdict(case.bars[0], case, row, {"copy": 4e12}) == ("≥ 85% of copy, L2 cold", "80%", False)


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
