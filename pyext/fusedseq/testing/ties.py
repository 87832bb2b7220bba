"""Ties of min(i, 1 - f), the capped input gate of a Mogrifier LSTM.

Where i and 1 - f are equal but for rounding, a kernel may take either: the result is the same, but
the gradient flows into one of the two gates alone. Among millions of cells there are such ties, so
a comparison of gradients must not depend on the side that a kernel took. Where they are exactly
equal, as gates without inputs are, each gate gets half of the gradient: nothing more is allowed.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

Results = tuple[list[torch.Tensor], list[torch.Tensor]]  # of an operator, and its gradients

# How far i and 1 - f may be apart at a tie, in units of the dtype's eps: sigmoids of sums of
# products of about a thousand terms have errors of this size.
MARGIN = 4


class TakesFirst(TorchFunctionMode):
    """Makes torch.minimum(a, b) take `a` where a < b + margin, unless they are exactly equal."""

    def __init__(self, margin: float) -> None:
        super().__init__()
        self.margin = margin

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not torch.minimum:
            return func(*args, **(kwargs or {}))
        a, b = args
        taken = torch.where(a < b + self.margin, a, b)
        return torch.where(a == b, torch.minimum(a, b), taken)


def spread(run_exact: Callable[[], Results], dtype: torch.dtype) -> Results:
    """How far each element of the fp64 oracle's results and gradients depends on the sides that are
    taken at ties: 0 where it depends on none.

    run_exact: calls the oracle    dtype: that in which i and 1 - f are rounded
    """
    margin = MARGIN * torch.finfo(dtype).eps
    with TakesFirst(margin):
        first = run_exact()
    with TakesFirst(-margin):
        second = run_exact()
    results, gradients = (
        [(a - b).abs() for a, b in zip(*pair, strict=True)]
        for pair in zip(first, second, strict=True)
    )
    return results, gradients
