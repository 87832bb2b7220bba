"""JAX, ONNX Runtime and CTranslate2 compute what fused computes; how they are timed."""

import argparse
import json
import time
from dataclasses import replace

import pytest
import torch
from fusedseq.data.parallel import START
from fusedseq.models.translator import PADDING, Translator, TranslatorSettings
from fusedseq.tasks.commands import bench as bench_cli

from bench.peers import (
    __main__,
    case_list,
    generated_pairs,
    installed,
    operators,
    trained_translator,
    translation,
    turns,
)
from bench.suite.case_list import CASES
from bench.suite.cases.attention import attention
from bench.suite.cases.recurrence import lstm, mogrifier


def parse(*words):
    parser = argparse.ArgumentParser()
    bench_cli.add_arguments(parser)
    return parser.parse_args(words)


def needs(peer):
    """Skips a test without a peer; the reason says what to install."""
    return pytest.mark.skipif(bool(installed.missing(peer)), reason=installed.sentence(peer))


SMALL = [
    lstm(5, 3, 6, 7),
    mogrifier(4, 3, 8),
    attention(2, 3, 5, 4),
    attention(2, 3, 5, 4, causal=True),
    *(
        case_list.with_keys(attention(6, 2, 5, 4, tensors=("lengths",), causal=causal))
        for causal in (False, True)
    ),
]
BOTH_MODES = [replace(c, backward=backward) for c in SMALL for backward in (True, False)]


def measure(peer, case):
    return operators.measure(case, {peer: installed.load(peer)}, 0.0)


@needs("jax")
@pytest.mark.parametrize("case", BOTH_MODES, ids=lambda case: f"{case.op}-{case.mode}")
def test_jax_computes_the_same(case):
    row = measure("jax", case)
    assert row["difference"]["jax"] < 1e-5
    assert row["compile seconds"]["jax"] > 0
    assert len(row["rounds"]["jax"]) == len(row["rounds"]["fused"]) == turns.MIN_ROUNDS


@needs("onnxruntime")
@pytest.mark.parametrize("case", BOTH_MODES, ids=lambda case: f"{case.op}-{case.mode}")
def test_onnx_runtime_computes_the_same(case):
    row = measure("onnxruntime", case)
    if case.op == "mogrifier_lstm" or case.backward:
        assert "onnxruntime" not in row["median"]
    else:
        assert row["difference"]["onnxruntime"] < 1e-5
        assert "onnxruntime" in row["median"]


class WrongPeer:
    """A peer whose attention returns the queries."""

    supports = staticmethod(lambda case: True)

    class Call:
        compile_seconds = None

        def __init__(self, case, args, kwargs, cotangents):
            self.q = args[0].detach()

        def __call__(self):
            return self.q

        def results(self):
            return [self.q]


def test_a_peer_with_another_result_is_not_timed():
    case = replace(attention(2, 3, 5, 4), backward=False)
    with pytest.raises(ValueError, match=r"attention-.*: JAX must agree with fused\.attention"):
        operators.measure(case, {"jax": WrongPeer}, 0.0)


def test_a_difference_that_is_not_a_number_is_an_error():
    got = torch.tensor([1.0, float("nan")])
    with pytest.raises(ValueError, match="got a difference of nan"):
        operators.check("jax", SMALL[0], [got], [torch.ones(2)])


@pytest.fixture(scope="module")
def small_model():
    """A translator of the architecture of en-fr/base, trained enough to end its sentences."""
    pairs = generated_pairs.lines(400, "train")
    languages = generated_pairs.languages(pairs, (200, 210))
    torch.manual_seed(0)
    settings = TranslatorSettings(
        embedding=32, heads=2, layers=2, feedforward=64, dropout=0.0, prenorm=False, max_length=100
    )
    model = Translator(200, 210, settings)
    with torch.no_grad():  # biases begin at 0, and would stay too small to be missed
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(0.3 * torch.randn_like(parameter))
    encoded = generated_pairs.encoded(pairs, languages)
    before = trained_translator.train(model, encoded, 1)
    assert trained_translator.train(model, encoded, 60, lr=3e-3, warmup=10) < before - 2
    with torch.no_grad():  # beam_search never generates these two
        model.output_bias[[PADDING, START]] = -1e4
    return model, languages, [source for source, _ in pairs[:20]]


@needs("ctranslate2")
@pytest.mark.parametrize("beam", translation.BEAMS)
def test_ctranslate2_writes_the_same_words(small_model, beam):
    calls = installed.load("ctranslate2")
    row = translation.measure(calls, small_model, beam, 0.0)
    assert row["equal"] >= translation.LEAST_EQUAL[beam]
    assert row["lines"] == round(row["equal"] * 20)
    assert row["tokens"] > 3 * row["lines"]


@needs("ctranslate2")
def test_a_model_that_ctranslate2_would_compute_otherwise_is_refused(small_model):
    model = Translator(200, 210, TranslatorSettings(embedding=32, heads=2, layers=1, prenorm=True))
    with pytest.raises(ValueError, match="must be post-norm with sinusoidal positions"):
        installed.load("ctranslate2").specification(model, small_model[1])


def test_a_trained_model_is_stored(tmp_path, monkeypatch):
    monkeypatch.setattr(trained_translator, "TRAIN", 40)
    monkeypatch.setattr(trained_translator, "TEST", 3)
    tiny = TranslatorSettings(embedding=20, heads=2, layers=1, feedforward=8)
    first, _, sentences = trained_translator.load(1, tmp_path, tiny)
    monkeypatch.setattr(trained_translator, "train", None)  # is not called again
    second, languages, _ = trained_translator.load(1, tmp_path, tiny)
    assert len(sentences) == 3
    assert tuple(len(each.vocabulary) for each in languages) == generated_pairs.SIZES
    assert not second.training
    for a, b in zip(first.parameters(), second.parameters(), strict=True):
        assert torch.equal(a, b)


def test_the_cases_are_those_of_the_suite_or_have_names_of_their_own():
    """A case of the same name has its gain in the tables of the suite, so it is the same call."""
    suite = {case.name: case for case in CASES}
    shared = [case for case in case_list.CASES if case.name in suite]
    assert {case.op for case in shared} == {"lstm", "mogrifier_lstm", "attention"}
    for case in shared:
        assert case.mode == suite[case.name].mode
        (args, kwargs), (others, options) = (c.inputs("cpu") for c in (case, suite[case.name]))
        assert kwargs == options
        assert [t.shape for t in args] == [t.shape for t in others]
    for case in case_list.CASES:
        assert not case.inputs("cpu")[1].get("dropout")


def test_every_call_has_one_turn_in_each_round():
    order = []
    calls = {name: (lambda name=name: (order.append(name), time.sleep(0.006))) for name in "abc"}
    times, busy = turns.time_rounds(calls, 0.0)
    assert {name: len(ts) for name, ts in times.items()} == dict.fromkeys("abc", turns.MIN_ROUNDS)
    assert all(t >= 0.006 for ts in times.values() for t in ts)
    # The timed call follows the one that wakes the threads.
    rounds = order[-2 * 3 * turns.MIN_ROUNDS :]
    assert all(rounds[i] == rounds[i + 1] for i in range(0, len(rounds), 2))
    assert len({tuple(rounds[i : i + 6 : 2]) for i in range(0, len(rounds), 6)}) == 3
    assert busy is None or busy >= 0


class Clocks:
    """Stands for the module time in a process that computes until the moment `busy`."""

    def __init__(self, busy):
        self.busy, self.now = busy, 0.0

    def perf_counter(self):
        return self.now

    def process_time(self):
        return min(self.now, self.busy)

    def sleep(self, seconds):
        self.now += seconds


@pytest.mark.parametrize("busy", [0.0, 0.3])
def test_a_turn_begins_when_the_threads_sleep(busy, monkeypatch):
    clocks = Clocks(busy)
    monkeypatch.setattr(turns, "time", clocks)
    turns.wait_for_threads()
    assert busy < clocks.now <= busy + 2 * turns.IDLE


def test_a_turn_begins_although_the_threads_never_sleep(monkeypatch):
    clocks = Clocks(float("inf"))
    monkeypatch.setattr(turns, "time", clocks)
    turns.wait_for_threads()
    assert turns.MOST_WAITING <= clocks.now <= turns.MOST_WAITING + turns.IDLE


def test_a_missing_peer_is_reported_in_one_sentence(monkeypatch, capsys):
    monkeypatch.setattr(installed, "find_spec", lambda name: None if "onnx" in name else object())
    assert installed.sentence("jax") == ""
    assert installed.sentence("onnxruntime") == (
        "ONNX Runtime is left out, because onnxruntime and onnx cannot be imported: pip install "
        "onnxruntime onnx, or pip install --no-build-isolation '.[peers]' for all peers"
    )
    monkeypatch.setattr(installed, "find_spec", lambda name: None)
    assert __main__.main([]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert [line.split(" is ")[0].split(": ")[1] for line in lines[:3]] == [
        "JAX",
        "ONNX Runtime",
        "CTranslate2",
    ]
    assert "no peer is installed" in lines[3]


def test_wrong_arguments_are_reported(capsys, tmp_path):
    with pytest.raises(SystemExit):
        __main__.main(["--op", "nonsense"])
    assert "no such operator: nonsense" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        __main__.main(["--record", "--out", str(tmp_path)])
    assert "--record writes into bench/results" in capsys.readouterr().err
    assert bench_cli.run(parse("--peers", "--full", "--mkl", "both")) == 2
    assert "--peers takes OPERATOR" in (err := capsys.readouterr().err)
    assert "got --full, --mkl" in err


def test_the_command_line_runs_the_peers():
    command = bench_cli.command(parse("lstm", "--peers", "--record", "--seconds", "2"))
    assert command[1:] == ["-m", "bench.peers", "--record", "--op=lstm", "--seconds=2.0"]


@needs("jax")
def test_a_run_writes_a_result_file(tmp_path, capsys):
    argv = ["--peers", "jax", "--case", "attention-L5-B8-N1-D32", "--seconds", "0.01"]
    assert __main__.main([*argv, "--out", str(tmp_path)]) == 0
    (written,) = tmp_path.glob("*-cpu-peers.json")
    result = json.loads(written.read_text())
    assert [row["mode"] for row in result["rows"]] == ["forward+backward", "forward"]
    assert result["versions"]["jax"]
    assert result["peers"]["jax"]["threads"] == result["machine"]["threads"]
    assert "| attention-L5-B8-N1-D32" in capsys.readouterr().out


@needs("jax")
def test_an_interrupted_run_writes_what_is_finished(tmp_path, monkeypatch, capsys):
    measured = operators.measure

    def interrupt_the_second(case, *args):
        if not case.backward:
            raise KeyboardInterrupt
        return measured(case, *args)

    monkeypatch.setattr(operators, "measure", interrupt_the_second)
    argv = ["--peers", "jax", "--case", "attention-L5-B8-N1-D32", "--seconds", "0.01"]
    assert __main__.main([*argv, "--out", str(tmp_path)]) == 130
    (written,) = tmp_path.glob("*-cpu-peers-partial.json")
    assert [row["mode"] for row in json.loads(written.read_text())["rows"]] == ["forward+backward"]
    assert "interrupted after 1 of 2 cases" in capsys.readouterr().err


@needs("jax")
def test_a_wrong_case_does_not_end_the_run(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(operators, "TOLERANCE", -1.0)
    argv = ["--peers", "jax", "--case", "attention-L5-B8-N1-D32", "--out", str(tmp_path)]
    assert __main__.main(argv) == 1
    assert capsys.readouterr().err.count("WRONG: ") == 2
    assert not list(tmp_path.iterdir())
