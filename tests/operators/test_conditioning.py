"""Comparisons of layer norms of few units with the oracle: `fusedseq.testing.conditioning`."""

import pytest
import torch
from fusedseq import reference
from fusedseq.testing import check, conditioning

T, B, X, H = 2, 1, 2, 3


def inputs() -> tuple[torch.Tensor, ...]:
    """Of layer_norm_gru."""
    generator = torch.Generator().manual_seed(3)
    normal = lambda *shape: torch.randn(*shape, generator=generator)  # noqa: E731
    x, W_ih, W_hh = normal(T, B, X), normal(3 * H, X), normal(3 * H, H)
    return x, W_ih, W_hh, 0 * normal(4 * H), normal(3 * H), normal(3 * H), normal(B, H)


def spread_of(args: tuple[torch.Tensor, ...]) -> float:
    def run_exact(args, kwargs):
        return list(reference.layer_norm_gru(*(t.double() for t in args), **kwargs)), []

    results, gradients = conditioning.spread(run_exact, args, {"eps": 1e-12}, torch.float32)
    assert gradients == []
    assert all((t == t.max()).all() for t in results)
    return max(t.max().item() for t in results)


def test_the_spread_is_of_the_size_of_a_rounding():
    assert 1e-8 < spread_of(inputs()) < 1e-5


def test_the_spread_grows_as_units_become_equal():
    x, W_ih, *others = inputs()
    equal = 1 + 1e-4 * W_ih  # the units of a gate differ by little: the norm magnifies this
    assert spread_of((x, equal, *others)) > 100 * spread_of((x, W_ih, *others))


@pytest.mark.parametrize("H", [3, conditioning.FEW_UNITS])
def test_a_wrong_result_fails(H):
    normal = torch.randn
    torch.manual_seed(5)
    args = (normal(T, B, X), normal(3 * H, X), normal(3 * H, H), normal(4 * H))
    args += (normal(3 * H), normal(3 * H), normal(B, H))

    def wrong(*args, **kwargs):
        y, *others = reference.layer_norm_gru(*args, **kwargs)
        return [1.0001 * y, *others]

    assert check("layer_norm_gru", args, {}, function=reference.layer_norm_gru) <= 1
    with pytest.raises(AssertionError, match="result 0"):
        check("layer_norm_gru", args, {}, function=wrong)
