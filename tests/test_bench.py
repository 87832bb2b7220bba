"""The benchmark suite judges by the right figures, and compares with baselines that compute the same thing."""

import argparse
import copy
import inspect
import json
from functools import partial

import pytest
import torch
from fusedseq import bench_cli, reference, testing

from bench import baselines, cases, compiled, figures, machine, report, roofline, suite

# Of the case table, what has no randomness at work and what the baselines take.
PLAIN = [
    case
    for case in testing.CASES
    if case.op in ("activation_regularization", "attention", "linear_cross_entropy", "lstm", "mogrifier_lstm", "split_cross_entropy")
    or "-p0" in f"{case.id}-"
    if case.op != "dropout_mask" and "p0." not in case.id and 0 not in case.inputs()[0][0].shape
    if not any(word in case.id for word in ("lengths", "dropout", "sparse", "z_loss", "details")) and ("zoneout" not in case.id or "training0" in case.id)
]  # fmt: skip
IDS = torch.arange(60_000).expand(2, -1)


def result(**times):
    """A row of a result as the suite writes it: 10 GFLOP, with these medians in seconds."""
    return {
        "name": "lstm-a", "op": "lstm", "mode": "forward+backward", "dtype": "float32", "error": 0.1, "roof": None,
        "rounds": {name: [t] * 3 for name, t in times.items()}, "median": times, "memory": dict.fromkeys(times, 2_000_000),
        "flops": 1e10, "bytes": 4e9, "others busy": 0.0, "left out": {}, "bars": [],
    }  # fmt: skip


@pytest.fixture(autouse=True)
def alone(monkeypatch):
    """The suite is a pytest of its own, whose pytest-benchmark does nothing where it takes it for a worker of pytest-xdist."""
    monkeypatch.delenv("PYTEST_XDIST_WORKER", raising=False)


@pytest.fixture
def document():
    rows = [
        result(fused=0.1, eager=0.3, torch=0.2) | {"bars": [["torch", 1.15], ["roof", 0.8]]},
        result(fused=0.1, eager=0.3, compiled=0.05) | {
            "name": "dropout-b", "bars": [["eager", 5.0]], "roof": {"name": "torch copy", "bytes": 5e9, "rounds": [0.1, 0.05, 0.2]}},
        result(fused=0.2, eager=0.1) | {"name": "lstm-c-forward", "left out": {"compiled": "did not compile in 60 s"}},
    ]  # fmt: skip
    gemm = {"torch.float32": {"torch.mm": 2e11, "own GEMM": 1e11}}
    return json.loads(
        json.dumps(machine.facts("cpu") | {"device": "cpu", "full": False, "no kernel": [], "gemm": gemm, "rows": rows})
    )


def test_every_operator_has_a_baseline_and_rows():
    for op in set(reference.__all__) - {"dropout_mask"}:
        oracle, *ours = (
            inspect.signature(getattr(module, op)).parameters for module in (reference, baselines, compiled)
        )
        assert all(list(oracle) == list(parameters) for parameters in ours), op
        assert any(row.op == op for row in cases.ROWS), op


@pytest.mark.parametrize(
    "case", [c for c in PLAIN if c.op == "attention" and not {"mask", "blind"} & {*c.id.split("-")}], ids=str
)
def test_attention_written_out_is_torchs(case):
    """Where every query sees a key: else the formula has NaN."""
    args, kwargs = case.inputs(dtype=torch.float64)
    wanted = baselines.attention(*args, **kwargs)
    blind = (case.id.endswith("causal1") and args[0].size(2) > args[1].size(2)) or "offset-2" in case.id
    if not blind:
        torch.testing.assert_close(baselines.attention_eager(*args, **kwargs), wanted)


@pytest.mark.parametrize("case", PLAIN, ids=str)
def test_baseline_agrees_with_the_oracle(case):
    args, kwargs = case.inputs(dtype=torch.float64)
    for ours, oracle in zip(
        *(testing.run(getattr(ops, case.op), args, kwargs) for ops in (baselines, reference)), strict=True
    ):
        torch.testing.assert_close(ours, oracle)


@pytest.mark.parametrize("bias", [True, False])
def test_lstm_loop_agrees_with_the_oracle(bias):
    args, kwargs = testing.lstm_case(5, 3, 7, 4, bias=bias).inputs(dtype=torch.float64)
    for ours, oracle in zip(
        *(testing.run(f, args, kwargs) for f in (baselines.lstm_loop, reference.lstm)), strict=True
    ):
        torch.testing.assert_close(ours, oracle)


@pytest.mark.parametrize(
    ("drop", "oracle", "x", "drawn"),
    [
        (baselines.dropout, reference.dropout, torch.ones(300, 200), 60_000),
        (baselines.locked_dropout, reference.locked_dropout, torch.ones(3, 300, 200), 60_000),
        (baselines.weight_drop, reference.weight_drop, torch.ones(300, 200), 60_000),
        (partial(baselines.weight_drop, variational=True), reference.weight_drop, torch.ones(60_000, 2), 60_000),
        (partial(baselines.embedding, IDS), partial(reference.embedding, IDS), torch.ones(60_000, 3), 60_000),
        (partial(baselines.embedding_rows, IDS), partial(reference.embedding, IDS), torch.ones(60_000, 3), 60_000),
    ],
)
def test_baselines_drop_as_the_oracle_does(drop, oracle, x, drawn):
    """The same two values, the same share of zeros, and one mask where one is shared."""
    torch.manual_seed(0)
    y = drop(x, 0.1, None)
    assert torch.equal(y.unique(), oracle(x, 0.1, 5).unique())
    assert abs((y == 0).double().mean() - 0.1) < 6 * (0.1 * 0.9 / drawn) ** 0.5
    if y.dim() == 3:
        assert torch.equal(y[0], y[1])


def test_masks_of_the_recurrence_are_drawn():
    args, kwargs = testing.mogrifier_lstm_case(6, 50, 40, 40).inputs()
    plain = baselines.mogrifier_lstm(*args, **kwargs)[0]
    for option in ("input_dropout", "state_dropout", "zoneout_h", "zoneout_c"):
        assert not torch.equal(plain, baselines.mogrifier_lstm(*args, **kwargs, **{option: 0.5})[0]), option
    _, (h, c) = baselines.mogrifier_lstm(*args, **kwargs, zoneout_h=1.0, zoneout_c=1.0)
    assert torch.equal(h, args[4])
    assert torch.equal(c, args[5])


def test_rows_have_names_of_their_own_and_count_work():
    names = [row.name for row in cases.ROWS]
    assert len(set(names)) == len(names)
    assert all(row.flops if row.roof == "gemm" else row.traffic and row.copied for row in cases.ROWS)
    square = next(row for row in cases.ROWS if row.name == "mogrifier_lstm-T70-B70-650-r5")
    assert square.flops == 2 * 70 * 70 * 13 * 650**2  # 5 rounds and 8 blocks of gates, each H x H


def test_words_are_in_the_vocabulary_and_frequent_ones_come_first():
    ids = cases.words(torch.randn, 10_000, 1000)
    assert ids.min() >= 0
    assert ids.max() < 1000
    assert (ids < 10).sum() > (ids >= 500).sum()


def test_gain_and_verdicts(document):
    lstm, dropout, forward = document["rows"]
    assert figures.baseline(lstm) == "torch"
    assert figures.gain(lstm, "torch") == 2
    assert figures.rate(lstm) == (pytest.approx(100), "GFLOP/s")
    assert figures.parts_of_roof(document, lstm) == pytest.approx({"torch.mm": 0.5, "own GEMM": 1.0})
    assert [met for _, met in figures.verdicts(document, lstm)] == [True, False]
    assert figures.parts_of_roof(document, dropout) == pytest.approx({"torch copy": 0.8})
    assert [met for _, met in figures.verdicts(document, dropout)] == [False]
    assert figures.baseline(forward) == "eager"
    missing = lstm | {"median": {"fused": 0.1, "eager": 0.3}}
    assert figures.verdicts(document, missing)[0][1] is None
    lean = lstm | {"memory": {"fused": 3, "eager": 20}, "bars": [["memory of eager", 0.15], ["memory of eager", 0.1]]}
    assert figures.verdicts(document, lean) == [("≤ 15% of memory of eager", True), ("≤ 10% of memory of eager", False)]
    assert figures.baseline(lean) == "torch"
    assert figures.verdicts(document, lean | {"memory": {"fused": None, "eager": 20}})[0][1] is None


@pytest.mark.parametrize("form", [report.markdown, report.plain])
def test_a_table_says_all(document, form):
    text = form(document)
    assert "2.00× torch" in text
    assert "did not compile in 60 s" in text
    assert "50% torch.mm, 100% own GEMM" in text
    assert text.count("MISSED") == 2
    assert len({line.count("|") for line in report.markdown(document).splitlines() if line.startswith("|")}) == 1


def test_slower_rows_are_found(document, tmp_path, capsys):
    new = copy.deepcopy(document)
    new["rows"][0]["median"]["fused"] *= 1.5
    new["rows"][1]["median"]["fused"] *= 1.05
    new["rows"].pop()
    (tmp_path / "old.json").write_text(json.dumps(document))
    assert report.compare(document, new, 0.1)
    out = capsys.readouterr().out
    assert "lstm-a" in out
    assert "+50%" in out
    assert "dropout-b" not in out
    assert "only: lstm-c" in out
    assert not report.compare(new, document, 0.1)
    assert report.finish(new, tmp_path, "new", tmp_path / "old.json", 0.1)
    assert json.loads((tmp_path / "new.json").read_text()) == new
    assert report.main([str(tmp_path / "new.json"), "--compare", str(tmp_path / "old.json")]) == 1
    assert report.main([str(tmp_path / "old.json"), "--compare", str(tmp_path / "new.json"), "--threshold", "0.6"]) == 0


def test_picture(document, tmp_path):
    pytest.importorskip("matplotlib")
    report.picture(document, tmp_path / "a.png")
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")


def test_peak_memory_sees_what_a_call_holds_at_once():
    n = 4_000_000  # 16 MB a tensor
    x = torch.ones(n)
    one, three = (roofline.peak_memory(call, "cpu") for call in (lambda: x + 1, lambda: (x + 1) * (x + 2)))
    if one is None:
        pytest.skip("this system does not tell")
    assert one == pytest.approx(4 * n, rel=0.1)
    assert three == pytest.approx(3 * 4 * n, rel=0.1)


def test_a_machine_is_named_by_its_processor():
    facts = {"machine": {"gpu": None, "cpu": "Intel(R) Xeon(R) CPU E5-2690 v4 @ 2.60GHz", "cores": 2}}
    assert machine.slug(facts, "cpu") == "intel-xeon-e5-2690-v4-2-cores-cpu"
    facts["machine"]["gpu"] = "NVIDIA H200"
    assert machine.slug(facts, "cuda:0") == "nvidia-h200-cuda"


def test_a_compiler_is_interrupted():
    def compiler():
        try:
            while True:
                torch.ones(3)
        except TimeoutError as error:
            raise RuntimeError("the compiler's own") from error

    budget = suite.AtMost(0.05)
    with pytest.raises(RuntimeError), budget:
        compiler()
    assert budget.over
    with (budget := suite.AtMost(60)):
        pass
    assert not budget.over


def parse(*words):
    parser = argparse.ArgumentParser()
    bench_cli.add_arguments(parser)
    return parser.parse_args(words)


def test_the_suite_runs_checks_and_writes(tmp_path):
    options = "--seconds", "0.01", "--compile-seconds", "0", "--out", str(tmp_path)
    assert bench_cli.run(parse("weight_drop", *options)) == 0
    (written,) = tmp_path.glob("*-cpu-weight_drop.json")
    (row,) = json.loads(written.read_text())["rows"]
    assert len(row["rounds"]["fused"]) == len(row["rounds"]["eager"]) >= 5
    assert row["error"] <= 1
    assert row["left out"] == {"compiled": "not asked for"}


def test_mistakes_are_told_in_one_sentence(tmp_path, monkeypatch, capfd):
    assert bench_cli.run(parse("nonsense", "--out", str(tmp_path))) == 2
    assert "no such operator: nonsense" in "".join(capfd.readouterr())
    assert bench_cli.run(parse("--compare", str(tmp_path / "none.json"))) == 2
    monkeypatch.setattr(bench_cli, "REPOSITORY", tmp_path)
    assert bench_cli.run(parse()) == 2
    assert "clone" in capfd.readouterr().err
