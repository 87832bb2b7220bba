"""Argument checks of `linear_cross_entropy` and `split_cross_entropy` beyond those that every
operator has: targets, options and splits.
"""

import pytest
import torch
from fusedseq import nn

from tests.support.good_calls import call


@pytest.mark.parametrize("bad", [-1, 4, 2**40, -(2**63)])
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_target_outside_the_vocabulary(bad, reduction):
    target = torch.tensor([0, bad, -100])
    message = rf"target must be in \[0, V\) = \[0, 4\) or ignore_index = -100, got {bad}"
    with pytest.raises(IndexError, match=f"^linear_cross_entropy: {message}"):
        call("linear_cross_entropy", target=target, reduction=reduction)
    call(
        "linear_cross_entropy",
        target=target[:2],
        x=lambda x: x[:2],
        reduction=reduction,
        ignore_index=bad,
    )


@pytest.mark.parametrize(
    ("name", "value", "wanted"),
    [
        ("target", torch.zeros(4, dtype=torch.int64), r"\(\.\.\.,\) of x = \(3,\), got \(4,\)"),
        ("z_loss", -1.0, "at least 0, got -1"),
        ("z_loss", float("nan"), "at least 0, got nan"),
        ("temperature", 0.0, "above 0, got 0"),
        ("temperature", -2.0, "above 0, got -2"),
        ("reduction", "average", "one of none, mean, sum, got average"),
    ],
)
def test_wrong_option_of_the_loss(name, value, wanted):
    with pytest.raises(ValueError, match=rf"^linear_cross_entropy: {name} must be {wanted}"):
        call("linear_cross_entropy", **{name: value})


@pytest.mark.parametrize("splits", [(0, 2), (2, 2), (3, 2), (2, 4), (-1,), (5,)])
def test_splits_that_do_not_ascend(splits):
    with pytest.raises(
        ValueError, match=r"^split_cross_entropy: splits must ascend in \(0, V\) = \(0, 4\), got"
    ):
        call("split_cross_entropy", splits=splits)


@pytest.mark.parametrize("name", ["z_loss", "temperature", "label_smoothing", "ignore_index"])
@pytest.mark.parametrize("value", [None, "a", True, [1], torch.tensor(0.5)], ids=str)
def test_an_option_of_the_loss_that_is_not_a_number(name, value):
    wanted = "a whole number" if name == "ignore_index" else "a number"
    message = f"{name} must be {wanted}, got {type(value).__name__}$"
    with pytest.raises(TypeError, match=f"^linear_cross_entropy: {message}"):
        call("linear_cross_entropy", **{name: value})
    if name == "ignore_index":
        with pytest.raises(TypeError, match=f"^split_cross_entropy: {message}"):
            call("split_cross_entropy", **{name: value})


def test_an_ignored_class_is_a_whole_number():
    with pytest.raises(TypeError, match=r"ignore_index must be a whole number, got float$"):
        call("linear_cross_entropy", ignore_index=1.0)


@pytest.mark.parametrize("splits", [None, True, 0.5], ids=str)
def test_splits_that_are_not_a_sequence(splits):
    message = f"splits must be a sequence of whole numbers, got {splits}$"
    with pytest.raises(TypeError, match=f"^split_cross_entropy: {message}"):
        call("split_cross_entropy", splits=splits)
    with pytest.raises(TypeError, match=f"^SplitCrossEntropy: {message}"):
        nn.SplitCrossEntropy(5, splits)


def test_splits_that_are_not_numbers():
    with pytest.raises(
        TypeError, match=r"^split_cross_entropy: splits must be whole numbers, got \(1.5,\)"
    ):
        call("split_cross_entropy", splits=(1.5,))


@pytest.mark.parametrize("name", ["target", "class_weights"])
def test_wrong_dtype_in_the_loss(name):
    with pytest.raises(
        TypeError, match=rf"^linear_cross_entropy: {name} must be .*, got torch.float16"
    ):
        call("linear_cross_entropy", **{name: lambda t: t.half()})
