"""Computed tables of positions, in fp32 whatever dtype the module is converted to."""

from collections.abc import Callable
from typing import Self

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor


def angles(positions: int, D: int, base: float = 10000.0) -> Tensor:
    """Returns position * base^(-2m / D) for m = 0 .. ceil(D / 2) - 1 (Vaswani et al., 2017).

    returns (positions, ceil(D / 2)) in fp64
    """
    rates = base ** (-torch.arange(0, D, 2, dtype=torch.float64, device="cpu") / D)
    return torch.outer(torch.arange(positions, dtype=torch.float64, device="cpu"), rates)


class ConstantTable(nn.Module):
    """A table that is computed, not learned.

    The table is not in the state dict, and stays in fp32 when the module is converted to another
    dtype. A subclass computes it, in fp64 on the CPU, in `_compute(rows)`.
    """

    table: Tensor

    def __init__(self, rows: int, device: torch.device | str | None) -> None:
        super().__init__()
        self.register_buffer("table", None, persistent=False)
        # As for torch's parameters, None is the default device.
        self._fill(rows, torch.get_default_device() if device is None else device)

    def _compute(self, rows: int) -> Tensor:
        """Returns the first `rows` rows of the table in fp64."""
        raise NotImplementedError

    def _fill(self, rows: int, device: torch.device | str) -> None:
        self.table = self._table(rows, device)

    def _table(self, rows: int, device: torch.device | str) -> Tensor:
        if torch.compiler.is_compiling() or not torch.is_inference_mode_enabled():
            return self._compute(rows).to(device, torch.float32)
        with torch.inference_mode(False):  # a later training saves the table for its backward
            return self._compute(rows).to(device, torch.float32)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        # The conversion may have rounded the table to a narrower dtype, so it is recomputed.
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]  # torch has no annotation
        self._fill(len(self.table), self.table.device)
        return self

    def at_least(self, rows: int) -> Tensor:
        """Returns the table with at least `rows` rows; a table that is too short is doubled."""
        if rows <= len(self.table):
            return self.table
        longer = self._table(max(rows, 2 * len(self.table)), self.table.device)
        # A table without data (FakeTensorMode) is for this call alone.
        if isinstance(longer, FakeTensor) and not isinstance(self.table, FakeTensor):
            return longer
        self.table = longer
        return longer
