"""A result of the benchmark suite: gains, verdicts, tables, pictures and comparisons."""

import copy
import inspect
import json

import pytest

from bench.suite import chart, machine, metrics, report


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


def test_gains_with_mkl_unthrottled(result):
    lifted = {"eager, MKL unthrottled": 0.25, "torch, MKL unthrottled": 0.15}
    measured, plain, _ = result["rows"]
    measured["median"] |= lifted
    assert metrics.unthrottled(plain) is None
    # Nothing that ran with MKL as installed is among the baselines.
    of_both = measured | {"median": measured["median"] | {"compiled": 0.05}}
    found = metrics.unthrottled(of_both)["median"]
    assert found == {"fused": 0.1, "eager": 0.25, "torch": 0.15}
    column = report.HEAD.index("gain, MKL unthrottled")
    assert report.cells(result, measured)[column] == "1.50× torch"
    assert report.cells(result, plain)[column] == ""
    assert not any("unthrottled" in note for note in report.notes(result))
