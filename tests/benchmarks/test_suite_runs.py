"""Runs of the benchmark suite: its child process, the modes of MKL, and what it writes."""

import argparse
import json
import os
import re
import signal
import subprocess
import sys
import types
from pathlib import Path

import pytest
import torch
from fusedseq.tasks.commands import bench as bench_cli

from bench.suite import conftest, machine, measure, metrics, mkl, roofline, second_process
from bench.suite.case_list import CASES


@pytest.fixture(autouse=True)
def not_an_xdist_worker(monkeypatch):
    """Hides pytest-xdist from the suite's own pytest, in which pytest-benchmark would be
    disabled.
    """
    monkeypatch.delenv("PYTEST_XDIST_WORKER", raising=False)


@pytest.mark.parametrize(
    ("seconds", "done", "total", "text"),
    [(7, 0, 9, ""), (10, 1, 4, ", 30 s left"), (60, 2, 42, ", 20 min left")],
)
def test_the_remaining_time_is_estimated_from_the_finished_cases(seconds, done, total, text):
    assert conftest.remaining(seconds, done, total) == text


def test_peak_memory_counts_what_a_call_holds_at_once():
    n = 4_000_000  # 16 MB a tensor
    x = torch.ones(n)
    one, three = (
        roofline.peak_memory(call, "cpu") for call in (lambda: x + 1, lambda: (x + 1) * (x + 2))
    )
    if one is None:
        pytest.skip("this system does not report the resident set")
    assert one == pytest.approx(4 * n, rel=0.1)
    assert three == pytest.approx(3 * 4 * n, rel=0.1)


def test_a_machine_is_named_by_its_processor():
    facts = {
        "machine": {"gpu": None, "cpu": "Intel(R) Xeon(R) CPU E5-2690 v4 @ 2.60GHz", "cores": 2}
    }
    assert machine.slug(facts, "cpu") == "intel-xeon-e5-2690-v4-2-cores-cpu"
    facts["machine"]["gpu"] = "NVIDIA H200"
    assert machine.slug(facts, "cuda:0") == "nvidia-h200-cuda"


def test_a_deadline_interrupts_a_compiler():
    def endless_compiler():
        try:
            while True:
                torch.ones(3)
        except TimeoutError as error:
            raise RuntimeError("an error of the compiler") from error

    deadline = measure.Deadline(0.05)
    with pytest.raises(RuntimeError), deadline:
        endless_compiler()
    assert deadline.exceeded
    with (deadline := measure.Deadline(60)):
        pass
    assert not deadline.exceeded


def parse(*words):
    parser = argparse.ArgumentParser()
    bench_cli.add_arguments(parser)
    return parser.parse_args(words)


def test_the_suite_measures_checks_and_writes(tmp_path):
    options = "--seconds", "0.01", "--compile-seconds", "0", "--out", str(tmp_path)
    assert bench_cli.run(parse("weight_drop", "--mkl", "both", *options)) == 0
    (written,) = tmp_path.glob("*-cpu-weight_drop.json")
    result = json.loads(written.read_text())
    assert result["mkl"] == "as-installed"
    (measured,) = result["rows"]
    assert len(measured["rounds"]["fused"]) == len(measured["rounds"]["eager"]) >= 5
    lifted = metrics.unthrottled(measured)
    assert (lifted is not None) == mkl.is_limited(result)
    if lifted:
        assert len(measured["rounds"]["eager, MKL unthrottled"]) >= 5
        assert "eager, MKL unthrottled" not in measured["memory"]
        assert {*lifted["median"]} == {"fused", "eager"}
        assert result["gemm, MKL unthrottled"]["torch.float32"]["torch.mm"] > 0
    assert measured["error"] <= 1
    assert measured["left out"] == {"compiled": "not requested"}


def test_the_order_of_the_baselines_rotates_from_round_to_round():
    """So that no call always has the same predecessor."""
    called, names = [], ("fused", "eager", "compiled", "torch")
    calls = {name: lambda name=name: called.append(name) for name in names}
    exchanges = types.SimpleNamespace(measure=lambda: False, times=[])
    line_exchange = types.SimpleNamespace(every=lambda seconds: exchanges)
    session = types.SimpleNamespace(
        device="cpu", seconds=0, second=None, line_exchange=line_exchange
    )

    class Benchmark:
        stats = types.SimpleNamespace(stats=types.SimpleNamespace(data=[0.0]))

        def pedantic(self, timed, setup, rounds):
            for _ in range(rounds):
                setup()
                timed()

    times, _, _ = measure.time_rounds(calls, Benchmark(), session)
    assert {len(times[name]) for name in names[1:]} == {measure.MIN_ROUNDS}
    rounds = [called[i : i + 4] for i in range(4, len(called), 4)]
    assert all(sorted(order) == sorted(names) and order[-1] == "fused" for order in rounds)
    assert {order[0] for order in rounds} == {*names[1:]}


def test_results_are_tracked_only_if_they_are_to_be_recorded(capfd):
    class Config:
        def __init__(self, **options):
            self.getoption = options.__getitem__

    assert conftest.folder(Config(out=None, record=True)) == conftest.RECORDED
    default = conftest.folder(Config(out=None, record=False))
    ignored = subprocess.run(["git", "check-ignore", "-q", default], cwd=conftest.ROOT)
    assert ignored.returncode == 0
    assert "--record" in bench_cli.command(parse("--record"))
    assert bench_cli.run(parse("--record", "--out", "x")) == 2
    assert "--record writes into bench/results" in capfd.readouterr().err


def test_an_interrupted_run_prints_and_writes_what_is_finished(tmp_path):
    """SIGINT reaches the whole process group, as Ctrl-C does, after the first of three cases."""
    operators = "dropout", "locked_dropout", "weight_drop"
    options = "--seconds", "0.01", "--compile-seconds", "0", "--out", str(tmp_path)
    process = subprocess.Popen(
        [sys.executable, "-m", "fusedseq", "bench", *operators, *options],
        cwd=Path(__file__).parents[2],
        env=bench_cli.environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    lines = []
    for line in process.stdout:
        lines.append(line)
        if "rounds" in line:
            os.killpg(process.pid, signal.SIGINT)
            break
    rest = process.communicate()[0]
    started = [line for line in [*lines, *rest.splitlines()] if line.startswith("[")]
    assert re.match(r"\[1/\d+\] \S+ \(\S+\): ", started[0])
    if len(started) > 1:
        assert re.match(r"\[2/\d+, \d+ (s|min) left\] ", started[1])
    assert process.returncode == 130, "".join(lines) + rest
    assert "interrupted after 1 of 3 cases" in rest
    (written,) = tmp_path.glob("*-partial.json")
    rows = json.loads(written.read_text())["rows"]
    assert len(rows) == 1
    assert rows[0]["name"] in rest


def test_an_interruption_without_a_line_number_is_reported():
    """Of a call that is interrupted as it begins, Python 3.11 may know no line."""
    frame = sys._getframe()
    without = types.TracebackType(None, frame, 1 << 20, -1)
    assert without.tb_lineno is None
    error = KeyboardInterrupt().with_traceback(types.TracebackType(without, frame, 0, 1))
    excinfo = pytest.ExceptionInfo.from_exception(error)
    conftest.pytest_keyboard_interrupt(excinfo)
    assert "KeyboardInterrupt" in str(excinfo.getrepr(funcargs=True))


def test_wrong_arguments_are_reported_in_one_sentence(tmp_path, monkeypatch, capfd):
    assert bench_cli.run(parse("nonsense", "--out", str(tmp_path))) == 2
    assert "no such operator: nonsense" in "".join(capfd.readouterr())
    assert bench_cli.run(parse("--compare", str(tmp_path / "none.json"))) == 2
    monkeypatch.chdir(tmp_path)
    assert bench_cli.run(parse()) == 2
    assert "clone" in capfd.readouterr().err


CHILD = (
    "import sys; sys.path.insert(0, '.'); from bench.suite import mkl; print(mkl.is_unthrottled())"
)


@pytest.mark.parametrize(("mode", "replaced"), [("as-installed", "False"), ("unthrottled", "True")])
def test_the_mkl_library_is_preloaded_in_the_child(mode, replaced, monkeypatch):
    """No timing: only that the child has the function that the library defines."""
    monkeypatch.delenv("LD_PRELOAD", raising=False)
    root = Path(__file__).parents[2]
    with mkl.environment(mode) as environment:
        preloaded = environment.get("LD_PRELOAD")
        assert (preloaded is not None) == (mode == "unthrottled")
        child = subprocess.run(
            [sys.executable, "-c", CHILD],
            cwd=root,
            env=environment,
            text=True,
            capture_output=True,
            check=True,
        )
    assert child.stdout.strip() == replaced, child.stderr
    assert preloaded is None or not Path(preloaded).exists()  # removed after the measurement


def test_a_preloaded_library_of_the_user_is_retained(monkeypatch):
    monkeypatch.setenv("LD_PRELOAD", "libother.so")
    monkeypatch.setenv("CC", "true")  # compiles nothing
    with mkl.environment("unthrottled") as environment:
        assert environment["LD_PRELOAD"].endswith(os.pathsep + "libother.so")


@pytest.fixture
def second():
    process = second_process.SecondProcess()
    yield process
    process.close()


def test_the_second_process_times_the_baselines(second):
    """No comparison of times: only that it makes any case and goes on after a failure."""
    (case,) = (case for case in CASES if case.name == "lstm-T5-B20-32-128")
    names = ["eager, MKL unthrottled", "torch, MKL unthrottled"]
    assert [*second.prepare(case.in_dtype(torch.float64), full=False)] == names
    calls = second.prepare(case, full=False)
    assert [*calls] == names
    assert all(call.seconds() > 0 for call in calls.values())
    with pytest.raises(RuntimeError, match="the process with MKL unthrottled: KeyError: 'none'"):
        second.seconds("none")
    assert calls["torch, MKL unthrottled"].seconds() > 0
    before = machine.cpu_seconds_of_others(second.pid)
    assert before < machine.cpu_seconds_of_others()


def test_a_second_process_that_ends_is_reported(second):
    os.kill(second.pid, signal.SIGKILL)
    with pytest.raises(RuntimeError, match="has ended"):
        second.seconds("eager")


def test_the_mkl_mode_is_in_the_result_and_in_its_name(tmp_path):
    options = "--seconds", "0.01", "--compile-seconds", "0", "--out", str(tmp_path)
    assert bench_cli.run(parse("locked_dropout", "--mkl", "unthrottled", *options)) == 0
    (written,) = tmp_path.glob("*-cpu-locked_dropout-mkl-unthrottled.json")
    assert json.loads(written.read_text())["mkl"] == "unthrottled"


def test_without_the_library_nothing_is_recorded_as_unthrottled(tmp_path, monkeypatch):
    monkeypatch.delenv("LD_PRELOAD", raising=False)
    command = [sys.executable, "-m", "pytest", "-q", "-s", "-p", "no:cacheprovider"]
    child = subprocess.run(
        [
            *command,
            "bench/suite/measure.py",
            "--mkl=unthrottled",
            "--op=dropout",
            f"--out={tmp_path}",
        ],
        cwd=Path(__file__).parents[2],
        text=True,
        capture_output=True,
        check=False,
    )
    assert child.returncode != 0
    assert "the library is not preloaded" in child.stdout + child.stderr
    assert not list(tmp_path.iterdir())


def test_pytest_codspeed_measures_the_same_cases(tmp_path):
    """`pytest --codspeed`: pytest-codspeed's fixture takes the place of pytest-benchmark's."""
    pytest.importorskip("pytest_codspeed")
    command = "-m", "pytest", "bench/suite/measure.py", "--codspeed", "-s", "-p", "no:cacheprovider"
    child = subprocess.run(
        [sys.executable, *command, "--op", "weight_drop"],
        cwd=conftest.ROOT,
        env=os.environ | {"CODSPEED_PROFILE_FOLDER": str(tmp_path)},
        text=True,
        capture_output=True,
    )
    assert child.returncode == 0, child.stdout + child.stderr
    (results,) = tmp_path.glob("results/*.json")
    measured = [entry["name"] for entry in json.loads(results.read_text())["benchmarks"]]
    names = [case.name for case in CASES if case.op == "weight_drop" and not case.full]
    assert measured == [f"test_case[{name}]" for name in names]
    assert "; measured by pytest-codspeed" in child.stderr
