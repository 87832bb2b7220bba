"""Norms of few units, whose results depend strongly on their inputs.

A layer norm divides by the standard deviation of a row. Where the row has few units, these may be
nearly equal by chance, and every rounding before the norm is then multiplied by a large number. The
oracle's own error does not show this: in a small tensor it may be small by chance. So the rounding
of the inputs is imitated in fp64, and what changes in the results is allowed as an error.
"""

from collections.abc import Callable, Sequence

import torch
from torch.utils._pytree import tree_map

from fusedseq.testing.ties import Results

OPERATORS = ("layer_norm_gru", "layer_norm_lstm")
FEW_UNITS = 16
RUNS = 4  # each one with other signs of the changes
SEED = 11


def has_few_units(op: str, hidden_size: int) -> bool:
    """Whether an operator normalizes rows of so few units that `spread` is needed."""
    return op in OPERATORS and hidden_size < FEW_UNITS


def spread(
    run_exact: Callable[[Sequence, dict], Results], args: Sequence, kwargs: dict, dtype: torch.dtype
) -> Results:
    """How far the fp64 oracle's results and gradients move if the inputs change by one rounding.

    run_exact: calls the oracle with the arguments that it is given
    args, kwargs: the operator's arguments    dtype: that of the rounding
    returns the largest change in each tensor, in a tensor of its shape
    """
    generator = torch.Generator().manual_seed(SEED)
    eps = torch.finfo(dtype).eps

    def change(value: object) -> object:
        if not isinstance(value, torch.Tensor) or not value.is_floating_point():
            return value
        signs = torch.randint(0, 2, value.shape, generator=generator).to(value.device) * 2 - 1
        return value.detach().double() * (1 + eps * signs)

    unchanged = run_exact(args, kwargs)
    changed = [run_exact(*tree_map(change, (args, kwargs))) for _ in range(RUNS)]

    def largest(exact: torch.Tensor, *others: torch.Tensor) -> torch.Tensor:
        if not exact.numel():
            return exact
        distance = max((other - exact).abs().max().item() for other in others)
        return torch.full_like(exact, distance)

    results, gradients = (
        [largest(*tensors) for tensors in zip(*each, strict=True)]
        for each in zip(unchanged, *changed, strict=True)
    )
    return results, gradients
