"""The profile of the recurrences: its products are those of the operators, and its table."""

import pytest
import torch

from bench.suite import recurrence_profile as profile


@pytest.mark.parametrize("rounds", [0, 1, 4, 5])
def test_the_products_are_those_of_the_forward_pass(rounds):
    """Every number of every weight is used once for each row and step, by each of its rounds."""
    recurrence = profile.Recurrence(T=3, B=2, X=8, H=12, rounds=rounds)
    gates = 4 * 12 * (8 + 12)
    assert recurrence.flops() == 2 * 3 * 2 * (gates + rounds * 8 * 12)


def test_every_call_runs():
    for rounds in (0, 5):
        timed = profile.calls(profile.Recurrence(T=3, B=2, X=8, H=12, rounds=rounds))
        assert list(timed) == ["forward", "products", "forward+backward"]
        y = timed["forward"]()[0]
        assert y.shape == (3, 2, 12)
        assert not y.requires_grad
        timed["products"]()
        assert all(isinstance(g, torch.Tensor) for g in timed["forward+backward"]())


def test_the_table():
    seconds = {"forward": 4e-3, "products": 3e-3, "forward+backward": 12e-3}
    row = {"name": "lstm-T1-B2-3-4", "flops": 6e9, "median": seconds}
    line = profile.table([row]).splitlines()[-1]
    assert [cell.strip() for cell in line.strip("|").split("|")] == [
        "`lstm-T1-B2-3-4`",
        "4",
        "3",
        "2000",
        "75%",
        "12",
        "75%",
    ]
