"""The table of missed targets: the limit of a case, and how near to it its target lies."""

import pytest

from bench.suite import missed_targets


@pytest.mark.parametrize(
    ("reached", "limits"), [(0.8, ["1.50×", "87%"]), (0.5, ["2.40×", "54%"]), (1.1, ["", ""])]
)
def test_the_limit_and_what_part_of_it_the_target_needs(monkeypatch, reached, limits):
    """A case that runs faster than the limit has none."""
    fractions = {"torch.mm": reached, "own GEMM": reached}
    monkeypatch.setattr(missed_targets.metrics, "fractions_of_roofline", lambda *_: fractions)
    entry = {"median": {"fused": 1.0, "eager": 1.2}}
    lines = missed_targets.missed_lines(
        "unthrottled", {"a": ({}, entry)}, lambda _: [("eager", 1.3), ("eager", 1.1)], {}
    )
    assert lines == [["a", "unthrottled", "1.20× eager", "1.3×", *limits, ""]]
