"""`make gpu` on a CPU: a part that fails does not stop the others, and the results stay small."""

import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

from bench.gpu import kernels, report
from bench.gpu.cases import Target, gpu_cases
from tools.gpu import processes

ROOT = Path(__file__).parents[2]


def run(*command, **environment):
    return subprocess.run(
        [sys.executable, *map(str, command)],
        cwd=ROOT,
        env={**os.environ, **environment},
        text=True,
        capture_output=True,
        timeout=300,
        check=False,
    )


@pytest.fixture(scope="module")
def rehearsed(tmp_path_factory):
    """A rehearsal in which a build and a benchmark fail: the process, its folder, its result."""
    out = tmp_path_factory.mktemp("gpu") / "results"
    process = run(
        "-m",
        "tools.gpu.run",
        "--out",
        out,
        "--only",
        "build",
        "sanitizer",
        "tests",
        "bench-ceilings",
        "bench-memory",
        "bench-losses",
        FUSEDSEQ_FAKE_GPU="build,bench-losses",
    )
    return process, out, json.loads((out / "rehearsal-cpu.json").read_text())


def test_failed_parts_are_reported_and_the_others_run(rehearsed):
    process, _, result = rehearsed
    parts = {part["name"]: part["what"] for part in result["parts"]}
    assert parts == {
        "build": "FAILED: exit code 1",
        "nvidia-smi": "skipped: a rehearsal",
        "bench-ceilings": "done",
        "tests": "done",
        "sanitizer": "skipped: a rehearsal",
        "bench-memory": "done",
        "bench-losses": "FAILED: exit code 1",
    }
    assert process.returncode == 1
    assert "make gpu: failed: build, bench-losses; " in process.stdout


def test_the_results_have_the_parts_that_ran(rehearsed):
    _, out, result = rehearsed
    assert result["ceilings"]["copy"] > 0
    assert {entry["op"] for entry in result["rows"]} >= {
        "locked_dropout",
        "weight_drop",
        "embedding",
        "residual_layer_norm",
    }
    assert all(
        times["call"]["median"] > 0 for entry in result["rows"] for times in entry["times"].values()
    )
    tests = json.loads((out / "rehearsal-cpu-tests.json").read_text())
    assert tests["passed"] == tests["collected"] > 0
    assert "build: made to fail" in (out / "rehearsal-cpu-log.txt").read_text()
    table = (out / "rehearsal-cpu.md").read_text()
    # The table has the cases of groups that did not run, too.
    assert "| lstm-T70-B20-650-650-weight_drop0.5-bfloat16 |" in table
    assert "targets met, " in table
    assert "MISSED" not in table  # the targets are for the real sizes


def test_results_are_few_and_small(rehearsed):
    files = list(rehearsed[1].iterdir())
    assert len(files) <= 8
    assert all(file.is_file() and 0 < file.stat().st_size < 16 << 20 for file in files)


def test_without_a_result_every_target_is_not_measured():
    targets = sum(len(case.targets) for case in gpu_cases())
    text = report.markdown({})
    assert text.count(": not measured") == targets > 30
    assert f"0 of {targets} targets met, {targets} not measured" in text


@pytest.mark.parametrize(
    ("target", "found", "met"),
    [
        (Target("eager", 5), "4.00×", False),
        (Target("eager", 5, "call"), "6.00×", True),
        (Target("best of eager, torch, flex", 2), "2.00× (torch)", True),
        (Target("us per step", 25), "20", True),
        (Target("us", 1000), "1400", False),
        (Target("torch", 1, "cold"), "", None),
    ],
    ids=str,
)
def test_a_target_is_judged(target, found, met):
    case = gpu_cases()[0]
    milliseconds = {
        "fused": {"graph": 1.4, "call": 2},
        "eager": {"graph": 5.6, "call": 12},
        "torch": {"graph": 2.8},
    }
    entry = {
        "times": {
            name: {way: {"median": ms / 1e3} for way, ms in by.items()}
            for name, by in milliseconds.items()
        }
    }
    assert report.verdict(target, case, entry, {"copy": 4e12})[1:] == (found, met)


def test_a_bandwidth_is_judged_by_the_measured_copy():
    case = next(case for case in gpu_cases() if case.benchmark.op == "locked_dropout")
    seconds = case.benchmark.traffic * 2 / 4e12  # bf16, at the rate of a copy
    entry = {"times": {"fused": {"cold": {"median": seconds / 0.8}}}}
    assert report.verdict(case.targets[0], case, entry, {"copy": 4e12}) == (
        "≥ 85% of copy, L2 cold",
        "80%",
        False,
    )


def is_running(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2][0] != "Z"
    except OSError:
        return False


def test_a_hanging_part_is_killed_with_its_children(tmp_path):
    script = f"sleep 60 & echo $! > {tmp_path / 'child'}; wait"
    outcome = processes.execute(("sh", "-c", script), tmp_path / "log", 1.0, dict(os.environ))
    assert outcome == "FAILED: not in time"
    child = int((tmp_path / "child").read_text())
    for _ in range(100):  # a killed process may need a moment to end
        if not is_running(child):
            break
        time.sleep(0.1)
    assert not is_running(child)
    outcome = processes.execute(("no such program",), tmp_path / "log", 1.0, {})
    assert outcome.startswith("FAILED: ")


def test_long_logs_are_cut_in_the_middle(tmp_path):
    for name in "ab":
        (tmp_path / f"{name}.txt").write_text(f"first {'é' * 5000} last")
    text = processes.concatenate_logs(tmp_path, "*.txt", 1000)
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


def test_tests_continue_after_one_that_crashes_or_hangs(tmp_path):
    planted = tmp_path / "test_planted.py"
    planted.write_text(PLANTED)
    # A file of the repository is named first so that pytest loads tests/conftest.py.
    process = run(
        "-m",
        "tools.gpu.run_tests",
        "--device=cpu",
        f"--out={tmp_path}",
        "--shards=1",
        "--hang=12",
        "--seconds=240",
        "tests/operators/test_isa.py",
        planted,
        "-k",
        "planted",
        PYTHONPATH=str(ROOT / "pyext"),
    )
    found = json.loads((tmp_path / "tests.json").read_text())
    assert {
        name: found[name]
        for name in ("collected", "passed", "failed", "crashed", "hung", "not reached")
    } == {"collected": 5, "passed": 2, "failed": 1, "crashed": 1, "hung": 1, "not reached": 0}, (
        process.stdout
    )
    assert process.returncode == 1
    failures = sorted(line["test"].rpartition("_")[2] for line in found["failures"])
    assert failures == ["crash", "hang", "wrong"]


def test_the_kernels_of_a_case_are_listed(capsys):
    kernels.main(["linear_cross_entropy-4900", "--device=cpu", "--calls=2"])
    text = capsys.readouterr().out
    for provider in ("fused", "eager"):
        assert f"linear_cross_entropy-4900-650-10000-bfloat16: {provider}" in text
    assert re.search(r"\| fusedseq::linear_cross_entropy +\| 1 +\| \d", text)
    with pytest.raises(SystemExit):
        kernels.main(["no such case", "--device=cpu"])
