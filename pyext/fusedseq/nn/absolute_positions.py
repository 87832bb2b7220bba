"""Positions that are added to embeddings."""

import torch
from torch import nn

from fusedseq import fused
from fusedseq.nn.constant_table import ConstantTable, angles
from fusedseq.nn.dropout import Dropout


class _Added(nn.Module):
    """Rows of a table added to embeddings; a subclass has them in `_rows(end)`: at least the first `end`."""

    def __init__(self, dropout, batch_first, ops):
        super().__init__()
        self.batch_first, self.dropout = batch_first, Dropout(dropout, ops=ops)

    def forward(self, x, offset=0):
        """x: (L, B, E), or (B, L, E) with `batch_first`    offset: the position of the first row, in cached decoding
        the number of those before it    returns dropout(x + the positions' rows), as x"""
        if x.dim() != 3 or x.size(2) != self.embed_dim or offset < 0:
            wanted = ("B, L" if self.batch_first else "L, B") + f", {self.embed_dim}"
            raise ValueError(f"{type(self).__name__}: x must be ({wanted}) and offset at least 0, got {tuple(x.shape)} and "
                             f"{offset}")  # fmt: skip
        end = offset + x.size(1 if self.batch_first else 0)
        rows = self._rows(end)[offset:end].to(x.dtype)
        return self.dropout(x + (rows if self.batch_first else rows[:, None]))


class SinusoidalPositions(_Added):
    """Sines and cosines added to embeddings (Vaswani et al., 2017, section 3.5): sin(p / 10000^(2m/E)) in column 2m and the
    cosine in column 2m + 1 of position p.

    embed_dim: E    dropout: of the sum, in training    max_positions: that the table starts with; it grows when more are
    asked for    batch_first: x is (B, L, E)
    forward: x (L, B, E), offset=0 -> as x
    """

    def __init__(self, embed_dim, dropout=0.0, *, max_positions=512, batch_first=False, device=None, ops=fused):
        super().__init__(dropout, batch_first, ops)
        self.embed_dim = embed_dim
        self._table = _Sinusoids(embed_dim, max_positions, device)

    def _rows(self, end):
        return self._table.reach(end)

    def extra_repr(self):
        return f"{self.embed_dim}"


class _Sinusoids(ConstantTable):
    def __init__(self, E, rows, device):
        self._E = E
        super().__init__(rows, device)

    def _compute(self, positions):
        turned = angles(positions, self._E)
        return torch.stack([turned.sin(), turned.cos()], dim=-1).flatten(1)[:, : self._E]


class LearnedPositions(_Added):
    """A learnt row for each position, added to embeddings (Gehring et al., 2017; Devlin et al., 2019).

    max_positions: P    embed_dim: E    dropout: of the sum, in training    batch_first: x is (B, L, E)
    `weight` is (P, E), drawn from N(0, 0.02^2).
    forward: x (L, B, E), offset=0 -> as x; ValueError for positions past the table
    """

    def __init__(self, max_positions, embed_dim, dropout=0.0, *, batch_first=False, device=None, dtype=None, ops=fused):
        super().__init__(dropout, batch_first, ops)
        self.embed_dim = embed_dim
        self.weight = nn.Parameter(torch.empty(max_positions, embed_dim, device=device, dtype=dtype))
        self.reset_parameters()

    def reset_parameters(self):
        nn.init.normal_(self.weight, std=0.02)

    def _rows(self, end):
        if end > len(self.weight):
            raise ValueError(
                f"LearnedPositions: there are max_positions = {len(self.weight)} rows, got {end} positions"
            )
        return self.weight

    def extra_repr(self):
        return f"{len(self.weight)}, {self.embed_dim}"
