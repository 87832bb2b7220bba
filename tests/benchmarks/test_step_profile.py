"""The profile of a training step: its groups, the limits of a gain, and what the page shows."""

import json

import pytest
from fusedseq.fused.flops import FORMULAS

from bench.suite import machine_page, measurements, missed_targets, step_profile, step_shares
from bench.suite.cases.models import accelerated

EVENTS = {
    "fusedseq::linear_cross_entropy": "products",
    "fusedseq::mogrifier_lstm_backward": "products",
    "aten::addmm": "products",
    "aten::mkldnn_rnn_layer_backward": "products",
    "fusedseq::attention": "attention",
    "fusedseq::attention_backward": "attention",
    "aten::_scaled_dot_product_flash_attention_for_cpu_backward": "attention",
    "fusedseq::linear_cross_entropy_scale": "pointwise",
    "fusedseq::residual_layer_norm_backward": "pointwise",
    "fusedseq::embedding": "pointwise",
    "aten::_fused_adam_": "optimizer",
    "Optimizer.step#Adam.step": "optimizer",
    "fusedseq::nt_asgd_step_": "optimizer",
    "aten::copy_": "the rest",
    "aten::_log_softmax": "the rest",
    "autograd::engine::evaluate_function: MmBackward0": "the rest",
    "FusedseqLinearBackward": "the rest",
}


@pytest.mark.parametrize("event", EVENTS)
def test_the_group_of_an_event(event):
    assert step_shares.group(event) == EVENTS[event]


def test_operators_that_count_operations_are_products_or_attention():
    for op in ("lstm", "linear", "mogrifier_lstm_pair", "attention"):
        assert op in FORMULAS
        wanted = "attention" if op == "attention" else "products"
        assert step_shares.group(f"fusedseq::{op}") == wanted


def test_time_of_no_operator_belongs_to_the_rest():
    events = {"aten::mm": 4.0, "aten::bmm": 1.0, "aten::copy_": 2.0, "fusedseq::dropout": 0.5}
    assert step_shares.grouped(events, wall=10.0) == {
        "products": 5.0,
        "attention": 0.0,
        "pointwise": 0.5,
        "optimizer": 0.0,
        "the rest": 4.5,
    }


@pytest.fixture
def row():
    """A step of 10 ms with 8 ms of products, which 4 ms are enough for, and a baseline of 12 ms."""
    fused = dict(zip(step_shares.GROUPS, (8.0, 0.5, 0.5, 0.25, 0.75), strict=True))
    baseline = dict(zip(step_shares.GROUPS, (9.0, 1.0, 0.0, 0.25, 1.75), strict=True))
    sides = {"fused": {"ms": fused}, "baseline": {"ms": baseline}}
    return {"operations": 2e9, "rate": 5e11, "others busy": 0.0, **sides}


def test_the_limits_of_a_gain(row):
    """A step of its products alone takes 8 ms, or 4 ms at the best rate, in place of 10 ms."""
    assert step_shares.gain(row) == pytest.approx(1.2)
    assert [*step_shares.limits(row, 1.2).values()] == pytest.approx([1.5, 3.0])
    assert [*step_shares.limits(row, 0.8).values()] == pytest.approx([1.0, 2.0])


def test_limits_of_missed_training_steps(row):
    entry = {"ratio": {"fused / baselines": 1.2}}
    line = ["en-es/base", "now", "1.20× baselines", "1.5×", "3.00×", "50%", "1.50× (100%)"]
    pairs = {"en-es/base": ({}, entry)}
    missed = missed_targets.missed_presets
    assert missed("now", pairs, "as-installed", {"en-es/base": row}) == [line]
    unknown = missed("now", pairs, "as-installed", {"en-es/base-bfloat16": row})
    assert unknown == [[*line[:4], "", "", ""]]
    entry["ratio"] = {"fused:bf16 / fused": 1.2}
    (line,) = missed("bf16", pairs, "as-installed", {"en-es/base-bfloat16": row})
    assert line[2:] == ["1.20× fused", "1.35×", "3.00×", "45%", "1.50× (90%)"]


def test_limits_of_a_missed_model(row, monkeypatch):
    fractions = {"torch.mm": 0.8}
    monkeypatch.setattr(missed_targets.metrics, "fractions_of_roofline", lambda *_: fractions)
    pairs = {"a": ({}, {"median": {"fused": 1.0, "torch": 1.2}})}
    (line,) = missed_targets.missed_lines("now", pairs, lambda _: [("torch", 1.5)], {"a": row})
    assert line[-3:] == ["1.50×", "100%", "1.50× (100%)"]


def test_the_page_has_the_table_where_steps_were_profiled(row, tmp_path):
    source = max(measurements.RESULTS.glob("*-cpu-training-speed.json"))
    (tmp_path / source.name).write_text(source.read_text())
    title = "## Where the time of a training step goes"
    assert title not in machine_page.markdown(measurements.load(tmp_path)[0])
    result = json.loads(source.read_text())
    result |= {"step profile": True, "date": "2031-01-01", "rows": {"en-es/base": row}}
    (tmp_path / "profile.json").write_text(json.dumps(result))
    machines = measurements.load(tmp_path)
    assert "en-es/base" in machines[0].steps["as-installed"]
    text = machine_page.markdown(machines[0])
    cells = (
        "10 / 12 | 8 / 9 | 0.5 / 1 | 0.5 / 0 | 0.25 / 0.25 | 0.75 / 1.75 | 1.20× | 1.50× | 3.00×"
    )
    assert f"| en-es/base | as installed | {cells} |" in text[text.index(title) :]


def check(found):
    """Asserts that every group that a small step has takes time."""
    for side in ("fused", "baseline"):
        ms = found[side]["ms"]
        assert list(ms) == list(step_shares.GROUPS)
        assert ms["products"] > 0
        assert ms["the rest"] > 0
    assert found["fused"]["ms"]["pointwise"] > 0
    assert found["baseline"]["ms"]["pointwise"] == 0
    assert found["operations"] > 0
    assert min(found["limit"].values()) > step_shares.gain(found)


def test_a_small_preset_is_profiled():
    small = ["embedding=16", "heads=2", "feedforward=32", "layers=1"]
    steps = step_profile.steps_of_preset("reverse/base-bfloat16", "synthetic", small)
    found = step_profile.measure("reverse/base-bfloat16", steps, rounds=1)
    check(found)
    assert found["dtype"] == "bfloat16"
    assert found["fused"]["ms"]["attention"] > 0
    assert found["fused"]["ms"]["optimizer"] > 0


def test_a_small_model_is_profiled():
    """Its operations are those that the benchmark case gives: three times the forward's."""
    case = accelerated("lstm", 5, 2, 16, 40)
    found = step_profile.measure(case.name, step_profile.steps_of_model(case), rounds=1)
    check(found)
    assert found["operations"] == 3 * case.flops


def test_operations_of_attention_are_not_counted():
    """A step whose float input is a leaf has the products of the maps alone."""
    L, B, E = 5, 2, 16
    case = accelerated("transformer", L, B, E, 2, 1)
    step = step_profile.steps_of_model(case)["fused"]
    assert step_profile.operations(step) == 3 * 2 * B * L * 28 * E * E


def test_every_case_that_has_a_target_can_be_profiled():
    assert len(step_profile.MODELS) == 8
    known = {*step_profile.PRESETS}
    for machine in measurements.load():
        for preset in (*machine.presets["as-installed"], *machine.presets["unthrottled"]):
            assert preset in known
        assert {f"{preset}-bfloat16" for preset in machine.bf16_presets} <= known


def test_an_unknown_case_is_refused(capsys):
    with pytest.raises(SystemExit):
        step_profile.main(["words/bass"])
    assert "unknown cases: words/bass" in capsys.readouterr().err
