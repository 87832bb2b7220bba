import torch
from torch import nn


def angles(positions, D, base=10000.0):
    """position * base^(-2m / D), m = 0 .. ceil(D / 2) - 1, in fp64: (positions, ceil(D / 2)) (Vaswani et al., 2017)."""
    rates = base ** (-torch.arange(0, D, 2, dtype=torch.float64) / D)
    return torch.outer(torch.arange(positions, dtype=torch.float64), rates)


class ConstantTable(nn.Module):
    """A table that is computed, not learnt: no part of the state dict, and fp32 whatever the module is converted to.

    A subclass computes it, in fp64, in `_compute(rows)`.
    """

    def __init__(self, rows, device):
        super().__init__()
        self.register_buffer("table", None, persistent=False)
        self._fill(rows, device)

    def _fill(self, rows, device):
        self.table = self._compute(rows).to(device, torch.float32)

    def _apply(self, fn, recurse=True):
        super()._apply(fn, recurse)
        self._fill(len(self.table), self.table.device)
        return self

    def reach(self, rows):
        """The table with at least so many rows: it grows by doubling."""
        if rows > len(self.table):
            self._fill(max(rows, 2 * len(self.table)), self.table.device)
        return self.table
