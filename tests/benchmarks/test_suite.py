"""The benchmark suite: its metrics are right, and its baselines agree with the oracles."""

import argparse
import copy
import inspect
import json
import os
import re
import signal
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
import torch
from fusedseq import reference, testing
from fusedseq.tasks.commands import bench as bench_cli

from bench.suite import (
    baselines,
    cases,
    chart,
    compiled,
    conftest,
    machine,
    measure,
    metrics,
    mkl,
    report,
    roofline,
    second_process,
)
from bench.suite.case_list import CASES

# The cases without randomness and without options that the baselines do not implement.
DETERMINISTIC = [
    case
    for case in testing.CASES
    if case.op
    in (
        "activation_regularization",
        "attention",
        "gru",
        "linear_cross_entropy",
        "lstm",
        "mogrifier_lstm",
        "rnn",
        "split_cross_entropy",
    )
    or "-p0" in f"{case.id}-"
    or (case.op == "attention_varlen" and case.id.endswith("spare0"))
    if case.op != "dropout_mask" and "p0." not in case.id and 0 not in case.inputs()[0][0].shape
    if not any(word in case.id for word in ("lengths", "dropout", "sparse", "z_loss", "details"))
    if not any(word in case.id for word in ("softcap", "sinks", "starts", "reverse"))
    and ("zoneout" not in case.id or (case.op == "mogrifier_lstm" and "training0" in case.id))
]
IDS = torch.arange(60_000).expand(2, -1)


def entry(**times):
    """Returns an entry of a result file: 10 GFLOP, with these medians in seconds."""
    return {
        "name": "lstm-a",
        "op": "lstm",
        "mode": "forward+backward",
        "dtype": "float32",
        "error": 0.1,
        "roof": None,
        "rounds": {name: [t] * 3 for name, t in times.items()},
        "median": times,
        "memory": dict.fromkeys(times, 2_000_000),
        "flops": 1e10,
        "bytes": 4e9,
        "others busy": 0.0,
        "left out": {},
        "bars": [],
    }


@pytest.fixture(autouse=True)
def not_an_xdist_worker(monkeypatch):
    """Hides pytest-xdist from the suite's own pytest, in which pytest-benchmark would be
    disabled.
    """
    monkeypatch.delenv("PYTEST_XDIST_WORKER", raising=False)


@pytest.fixture
def result():
    entries = [
        entry(fused=0.1, eager=0.3, torch=0.2) | {"bars": [["torch", 1.15], ["roof", 0.8]]},
        entry(fused=0.1, eager=0.3, compiled=0.05)
        | {
            "name": "dropout-b",
            "bars": [["eager", 5.0]],
            "roof": {"name": "torch copy", "bytes": 5e9, "rounds": [0.1, 0.05, 0.2]},
        },
        entry(fused=0.2, eager=0.1)
        | {"name": "lstm-c-forward", "left out": {"compiled": "did not compile in 60 s"}},
    ]
    gemm = {"torch.float32": {"torch.mm": 2e11, "own GEMM": 1e11}}
    return json.loads(
        json.dumps(
            machine.facts("cpu")
            | {"device": "cpu", "full": False, "no kernel": [], "gemm": gemm, "rows": entries}
        )
    )


# Their baselines take the arguments of their benchmark cases alone.
FOR_CASES_ONLY = {"attention_varlen", "gru", "layer_norm_gru", "layer_norm_lstm", "peephole_lstm"}
FOR_CASES_ONLY |= {"bidirectional_lstm", "projected_lstm", "rnn"}


def test_every_operator_has_baselines_of_its_signature_and_cases():
    assert all(any(c.op == op for c in CASES) for op in FOR_CASES_ONLY)
    for op in set(reference.__all__) - {"dropout_mask"} - FOR_CASES_ONLY:
        oracle, *ours = (
            inspect.signature(getattr(module, op)).parameters
            for module in (reference, baselines, compiled)
        )
        assert all(list(oracle) == list(parameters) for parameters in ours), op
        assert any(case.op == op for case in CASES), op


@pytest.mark.parametrize(
    "case",
    [
        c
        for c in DETERMINISTIC
        if c.op == "attention" and not {"mask", "blind"} & {*c.id.split("-")}
    ],
    ids=str,
)
def test_attention_formula_agrees_with_torch(case):
    """Only where every query sees at least one key: without any the formula is NaN."""
    args, kwargs = case.inputs(dtype=torch.float64)
    expected = baselines.attention(*args, **kwargs)
    some_query_sees_no_key = (
        (case.id.endswith("causal1") and args[0].size(2) > args[1].size(2))
        or "offset-2" in case.id
        or case.id.endswith("offset12")
    )
    if not some_query_sees_no_key:
        torch.testing.assert_close(baselines.attention_eager(*args, **kwargs), expected)


@pytest.mark.parametrize("words", [("softcap",), ("sinks",), ("sinks", "softcap")], ids=str)
def test_the_attention_formula_has_softcap_and_sinks(words):
    options = {"softcap": 3.0} if "softcap" in words else {}
    tensors = ("sinks",) if "sinks" in words else ()
    case = testing.attention_case(2, 3, 7, 7, 4, *tensors, causal=True, **options)
    args, kwargs = case.inputs(dtype=torch.float64)
    expected = reference.attention(*args, **kwargs)
    torch.testing.assert_close(baselines.attention_eager(*args, **kwargs), expected)


def test_the_eager_lstm_starts_sequences_inside_of_a_row():
    case = testing.lstm_case(5, 4, 6, 5, starts=[(0, 1), (2, 0), (3, 0), (4, 3)])
    args, kwargs = case.inputs(dtype=torch.float64)
    expected = reference.lstm(*args, **kwargs)
    torch.testing.assert_close(baselines.lstm_loop(*args, **kwargs), expected)


@pytest.mark.parametrize("op", ["rnn", "bidirectional_lstm", "projected_lstm"])
def test_an_eager_loop_agrees_with_the_oracle(op):
    case = {
        "rnn": testing.hidden_state_case("rnn", 3, 2, 5, 4),
        "bidirectional_lstm": testing.bidirectional_lstm_case(3, 2, 5, 4),
        "projected_lstm": testing.projected_lstm_case(3, 2, 5, 4),
    }[op]
    args, _ = case.inputs(dtype=torch.float64)
    for loop in (getattr(baselines, f"{op}_loop"), getattr(baselines, op)):
        torch.testing.assert_close(loop(*args), getattr(reference, op)(*args))


@pytest.mark.parametrize("case", DETERMINISTIC, ids=str)
def test_baseline_agrees_with_the_oracle(case):
    args, kwargs = case.inputs(dtype=torch.float64)
    for ours, oracle in zip(
        *(testing.run(getattr(ops, case.op), args, kwargs) for ops in (baselines, reference)),
        strict=True,
    ):
        torch.testing.assert_close(ours, oracle)


@pytest.mark.parametrize("bias", [True, False])
def test_lstm_loop_agrees_with_the_oracle(bias):
    args, kwargs = testing.lstm_case(5, 3, 7, 4, bias=bias).inputs(dtype=torch.float64)
    for ours, oracle in zip(
        *(testing.run(f, args, kwargs) for f in (baselines.lstm_loop, reference.lstm)), strict=True
    ):
        torch.testing.assert_close(ours, oracle)


@pytest.mark.parametrize("op", ["layer_norm_gru", "layer_norm_lstm", "peephole_lstm"])
@pytest.mark.parametrize("bias", [True, False])
def test_loops_of_cells_with_vectors_agree_with_the_oracle(op, bias):
    make = testing.hidden_state_case if "gru" in op else testing.lstm_with_vectors_case
    case = make(op, 5, 3, 7, 4, bias=bias)
    args, kwargs = case.inputs(dtype=torch.float64)
    for ours, oracle in zip(
        *(testing.run(getattr(ops, op), args, kwargs) for ops in (baselines, reference)),
        strict=True,
    ):
        torch.testing.assert_close(ours, oracle)


@pytest.mark.parametrize(
    ("baseline", "oracle", "x", "drawn"),
    [
        (baselines.dropout, reference.dropout, torch.ones(300, 200), 60_000),
        (baselines.locked_dropout, reference.locked_dropout, torch.ones(3, 300, 200), 60_000),
        (baselines.weight_drop, reference.weight_drop, torch.ones(300, 200), 60_000),
        (
            partial(baselines.weight_drop, variational=True),
            reference.weight_drop,
            torch.ones(60_000, 2),
            60_000,
        ),
        (
            partial(baselines.embedding, IDS),
            partial(reference.embedding, IDS),
            torch.ones(60_000, 3),
            60_000,
        ),
        (
            partial(baselines.embedding_rows, IDS),
            partial(reference.embedding, IDS),
            torch.ones(60_000, 3),
            60_000,
        ),
    ],
)
def test_baselines_have_the_oracles_distribution_of_masks(baseline, oracle, x, drawn):
    """The same two values, the same share of zeros, and a mask shared by all steps where it has to
    be.
    """
    torch.manual_seed(0)
    y = baseline(x, 0.1, None)
    assert torch.equal(y.unique(), oracle(x, 0.1, 5).unique())
    assert abs((y == 0).double().mean() - 0.1) < 6 * (0.1 * 0.9 / drawn) ** 0.5
    if y.dim() == 3:
        assert torch.equal(y[0], y[1])


def test_every_dropout_of_the_recurrence_has_an_effect():
    args, kwargs = testing.mogrifier_lstm_case(6, 50, 40, 40).inputs()
    without = baselines.mogrifier_lstm(*args, **kwargs)[0]
    for option in ("input_dropout", "state_dropout", "zoneout_h", "zoneout_c"):
        assert not torch.equal(
            without, baselines.mogrifier_lstm(*args, **kwargs, **{option: 0.5})[0]
        ), option
    _, (h, c) = baselines.mogrifier_lstm(*args, **kwargs, zoneout_h=1.0, zoneout_c=1.0)
    assert torch.equal(h, args[4])
    assert torch.equal(c, args[5])


def test_cases_have_unique_names_and_count_their_work():
    names = [case.name for case in CASES]
    assert len(set(names)) == len(names)
    assert all(
        case.flops if case.roofline == "gemm" else case.traffic and case.copied for case in CASES
    )
    square = next(case for case in CASES if case.name == "mogrifier_lstm-T70-B70-650-r5")
    # Five rounds and eight blocks of gates, each H x H.
    assert square.flops == 2 * 70 * 70 * 13 * 650**2


def test_word_ids_are_in_the_vocabulary_and_small_ones_are_frequent():
    ids = cases.words(torch.randn, 10_000, 1000)
    assert ids.min() >= 0
    assert ids.max() < 1000
    assert (ids < 10).sum() > (ids >= 500).sum()


def test_gain_and_verdicts(result):
    lstm, dropout, forward = result["rows"]
    assert metrics.baseline(lstm) == "torch"
    assert metrics.gain(lstm, "torch") == 2
    assert metrics.rate(lstm) == (pytest.approx(100), "GFLOP/s")
    assert metrics.fractions_of_roofline(result, lstm) == pytest.approx(
        {"torch.mm": 0.5, "own GEMM": 1.0}
    )
    assert [met for _, met in metrics.verdicts(result, lstm)] == [True, False]
    assert metrics.fractions_of_roofline(result, dropout) == pytest.approx({"torch copy": 0.8})
    assert [met for _, met in metrics.verdicts(result, dropout)] == [False]
    assert metrics.baseline(forward) == "eager"
    missing = lstm | {"median": {"fused": 0.1, "eager": 0.3}}
    assert metrics.verdicts(result, missing)[0][1] is None
    lean = lstm | {
        "memory": {"fused": 3, "eager": 20},
        "bars": [["memory of eager", 0.15], ["memory of eager", 0.1]],
    }
    assert metrics.verdicts(result, lean) == [
        ("≤ 15% of memory of eager", True),
        ("≤ 10% of memory of eager", False),
    ]
    assert metrics.baseline(lean) == "torch"
    assert metrics.verdicts(result, lean | {"memory": {"fused": None, "eager": 20}})[0][1] is None


@pytest.mark.parametrize("form", [report.markdown, report.plain])
def test_the_table_has_gains_reasons_and_verdicts(result, form):
    text = form(result)
    assert "2.00× torch" in text
    assert "did not compile in 60 s" in text
    assert "50% torch.mm, 100% own GEMM" in text
    assert text.count("MISSED") == 2
    assert (
        len(
            {
                line.count("|")
                for line in report.markdown(result).splitlines()
                if line.startswith("|")
            }
        )
        == 1
    )


def test_compare_reports_slower_cases(result, tmp_path, capsys):
    new = copy.deepcopy(result)
    new["rows"][0]["median"]["fused"] *= 1.5
    new["rows"][1]["median"]["fused"] *= 1.05
    new["rows"].pop()
    (tmp_path / "old.json").write_text(json.dumps(result))
    assert report.compare(result, new, 0.1)
    out = capsys.readouterr().out
    assert "lstm-a" in out
    assert "+50%" in out
    assert "dropout-b" not in out
    assert "only: lstm-c" in out
    assert not report.compare(new, result, 0.1)
    assert report.finish(new, tmp_path, "new", tmp_path / "old.json", 0.1)
    assert json.loads((tmp_path / "new.json").read_text()) == new
    assert report.main([str(tmp_path / "new.json"), "--compare", str(tmp_path / "old.json")]) == 1
    assert (
        report.main(
            [
                str(tmp_path / "old.json"),
                "--compare",
                str(tmp_path / "new.json"),
                "--threshold",
                "0.6",
            ]
        )
        == 0
    )


def test_picture(result, tmp_path):
    pytest.importorskip("matplotlib")
    report.picture(result, tmp_path / "a.png")
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")


def test_bars_start_at_one_on_a_logarithmic_axis(result, tmp_path):
    figure = pytest.importorskip("matplotlib.figure").Figure()
    axes = figure.subplots()
    chart.draw_entry(axes, 0, result["rows"][2], set())  # fused 0.2 s, eager 0.1 s
    (bar,) = axes.patches
    assert sorted((bar.get_x(), bar.get_x() + bar.get_width())) == [0.5, 1]
    assert 'set_xscale("log")' in inspect.getsource(chart.draw)


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


def test_gains_with_mkl_unthrottled(result):
    lifted = {"eager, MKL unthrottled": 0.25, "torch, MKL unthrottled": 0.15}
    measured, plain, _ = result["rows"]
    measured["median"] |= lifted
    assert metrics.unthrottled(plain) is None
    column = report.HEAD.index("gain, MKL unthrottled")
    assert report.cells(result, measured)[column] == "1.50× torch"
    assert report.cells(result, plain)[column] == ""
    assert not any("unthrottled" in note for note in report.notes(result))


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
