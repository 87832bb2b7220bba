"""Modules that add a vector for each absolute position to embeddings."""

import torch
from torch import Tensor, nn

from fusedseq import fused
from fusedseq.nn.constant_table import ConstantTable, angles
from fusedseq.nn.dropout import Dropout
from fusedseq.nn.operators import Operators, shown_options


class _AddedPositions(nn.Module):
    """Adds rows of a position table to embeddings. A subclass implements `_table_rows`."""

    embed_dim: int

    def __init__(self, dropout: float, batch_first: bool, ops: Operators) -> None:
        super().__init__()
        self.batch_first = batch_first
        self.dropout = Dropout(dropout, ops=ops)

    def _table_rows(self, end: int) -> Tensor:
        """Returns a table of at least `end` rows, (>= end, E)."""
        raise NotImplementedError

    def forward(self, x: Tensor, offset: int = 0) -> Tensor:
        """Adds the position vectors to embeddings.

        x: (L, B, E), or (B, L, E) with `batch_first`
        offset: the position of the first element of x; in cached decoding, the number of positions
            before it
        returns dropout(x + position vectors), of x's shape
        Errors: ValueError for another shape of x or a negative offset.
        """
        if x.dim() != 3 or x.size(2) != self.embed_dim or offset < 0:
            required = ("B, L" if self.batch_first else "L, B") + f", {self.embed_dim}"
            raise ValueError(
                f"{type(self).__name__}: x must be ({required}) and offset at least 0, got "
                f"{tuple(x.shape)} and {offset}"
            )
        end = offset + x.size(1 if self.batch_first else 0)
        rows = self._table_rows(end)[offset:end].to(x.dtype)
        dropped: Tensor = self.dropout(x + (rows if self.batch_first else rows[:, None]))
        return dropped


class SinusoidalPositions(_AddedPositions):
    """Adds sines and cosines of the position to embeddings (Vaswani et al., 2017, section 3.5).

    At position p, column 2m is sin(p / 10000^(2m/E)) and column 2m + 1 is the cosine of the same
    angle.
    embed_dim: E
    dropout: probability of dropping an element of the sum in training mode
    max_positions: initial number of rows of the table, which grows when more are needed
    batch_first: x is (B, L, E)
    device: of the table    ops: `fusedseq.fused` or `fusedseq.reference`
    forward: x (L, B, E), offset=0 -> as x
    Errors: ValueError for a dropout outside [0, 1], or max_positions below 0; those of `forward`.
    """

    def __init__(
        self,
        embed_dim: int,
        dropout: float = 0.0,
        *,
        max_positions: int = 512,
        batch_first: bool = False,
        device: torch.device | str | None = None,
        ops: Operators = fused,
    ) -> None:
        super().__init__(dropout, batch_first, ops)
        if max_positions < 0:
            raise ValueError(
                f"SinusoidalPositions: max_positions must be at least 0, got {max_positions}"
            )
        self.embed_dim, self.max_positions = embed_dim, max_positions
        self._table = _SinusoidTable(embed_dim, max_positions, device)

    def _table_rows(self, end: int) -> Tensor:
        return self._table.at_least(end)

    def extra_repr(self) -> str:
        return shown_options(self)


class _SinusoidTable(ConstantTable):
    def __init__(self, embed_dim: int, rows: int, device: torch.device | str | None) -> None:
        self._embed_dim = embed_dim
        super().__init__(rows, device)

    def _compute(self, rows: int) -> Tensor:
        theta = angles(rows, self._embed_dim)
        return torch.stack([theta.sin(), theta.cos()], dim=-1).flatten(1)[:, : self._embed_dim]


class LearnedPositions(_AddedPositions):
    """Adds a learned vector for each position to embeddings.

    Gehring et al., 2017; Devlin et al., 2019.
    max_positions: P    embed_dim: E
    dropout: probability of dropping an element of the sum in training mode
    batch_first: x is (B, L, E)
    device, dtype: of the parameters, as in torch    ops: `fusedseq.fused` or `fusedseq.reference`
    The parameter `weight` is (P, E), initialized from N(0, 0.02^2).
    forward: x (L, B, E), offset=0 -> as x
    Errors: ValueError for a dropout outside [0, 1], and in forward for positions of P and above;
    those of `forward`.
    """

    def __init__(
        self,
        max_positions: int,
        embed_dim: int,
        dropout: float = 0.0,
        *,
        batch_first: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        ops: Operators = fused,
    ) -> None:
        super().__init__(dropout, batch_first, ops)
        self.embed_dim, self.max_positions = embed_dim, max_positions
        self.weight = nn.Parameter(
            torch.empty(max_positions, embed_dim, device=device, dtype=dtype)
        )
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draws the weight from N(0, 0.02^2)."""
        nn.init.normal_(self.weight, std=0.02)

    def _table_rows(self, end: int) -> Tensor:
        if end > len(self.weight):
            raise ValueError(
                f"LearnedPositions: positions must be at most max_positions = {len(self.weight)}, "
                f"got {end}"
            )
        return self.weight

    def extra_repr(self) -> str:
        return shown_options(self)
