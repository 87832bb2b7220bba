"""Relative positions of attention, for `MultiheadAttention(positions=...)`.

Such a module is called with the number of queries L, the number of keys S and the position of the
first query, and returns the tensor for the argument of the operator `attention` that its class
attribute `argument` names. Several layers may share one module.
"""

import math
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fusedseq.nn.constant_table import ConstantTable, angles


class RelativePositions(nn.Module):
    """The base class of the modules for `MultiheadAttention(positions=...)`."""

    argument: ClassVar[str]  # of the operator `attention` that receives the result of forward

    def forward(self, L: int, S: int, offset: int) -> Tensor:
        """Returns the tensor for L queries, the first at position `offset`, and S keys."""
        raise NotImplementedError

    def options(self, L: int, S: int, offset: int) -> dict[str, Any]:
        """Returns the arguments of the operator `attention`, by name: the result of forward, and
        any settings that belong to it."""
        return {self.argument: self(L, S, offset)}


class ALiBi(ConstantTable, RelativePositions):
    """Attention with linear biases: subtracts slope_n * distance from the logits of head n.

    Press et al., 2022.
    num_heads: N. For a power of two the slopes are 2^(-8/N), 2^(-16/N), ..., 2^-8. For other N they
        are those of the next lower power of two, and for the remaining heads every other one of
        twice that power, as in the authors' code.
    device: of the table
    forward: -> (N,) fp32, for any lengths
    Errors: ValueError for num_heads below 1.
    """

    argument = "alibi"

    def __init__(self, num_heads: int, *, device: torch.device | str | None = None) -> None:
        if num_heads < 1:
            raise ValueError(f"ALiBi: num_heads must be at least 1, got {num_heads}")
        super().__init__(num_heads, device)

    def _compute(self, rows: int) -> Tensor:
        power = 2 ** (rows.bit_length() - 1)
        slopes = [2 ** (-8 * n / power) for n in range(1, power + 1)]
        between = [2 ** (-4 * n / power) for n in range(1, 2 * power, 2)]
        return torch.tensor([*slopes, *between][:rows], dtype=torch.float64, device="cpu")

    def forward(self, L: int, S: int, offset: int) -> Tensor:
        """Returns the slopes, (N,)."""
        return self.table

    def extra_repr(self) -> str:
        return f"{len(self.table)}"


class RelativeBias(RelativePositions):
    """T5's relative bias: a learned scalar per head for each bucket of distances.

    Raffel et al., 2020, section 2.1.
    num_heads: N
    num_buckets: half of the buckets hold one small distance each; the others hold logarithmically
        growing ranges up to max_distance, and the last one every larger distance
    bidirectional: half of all buckets are for keys after the query; otherwise, as in T5's decoder,
        such keys count as distance 0
    device, dtype: of the parameter, as in torch
    The parameter `weight` is (num_buckets, N), T5's relative_attention_bias, Xavier uniform.
    forward: -> (1, N, L, S); its gradient is summed in a fixed order
    Errors: ValueError for num_heads or num_buckets that are too small, or a max_distance that is
    not above the number of buckets with one distance each.
    """

    argument = "bias"

    def __init__(
        self,
        num_heads: int,
        num_buckets: int = 32,
        max_distance: int = 128,
        *,
        bidirectional: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        exact = num_buckets // (4 if bidirectional else 2)
        if num_heads < 1 or exact < 1 or max_distance <= exact:
            raise ValueError(
                "RelativeBias: num_heads must be at least 1, num_buckets at least 2 (4 if "
                f"bidirectional) and max_distance above the {exact} distances with a bucket each, "
                f"got {num_heads}, {num_buckets} and {max_distance}"
            )
        self.num_buckets, self.max_distance = num_buckets, max_distance
        self.bidirectional = bidirectional
        self.weight = nn.Parameter(torch.empty(num_buckets, num_heads, device=device, dtype=dtype))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draws the weight from Xavier's uniform distribution."""
        nn.init.xavier_uniform_(self.weight)

    def buckets(self, distances: Tensor) -> Tensor:
        """Returns the bucket of each distance j - i (int64); it is rounded in fp32, as in T5."""
        n, behind = self.num_buckets, -distances
        ahead = torch.zeros_like(distances)
        if self.bidirectional:
            n //= 2
            ahead, behind = n * (distances > 0), behind.abs()
        behind, exact = behind.clamp_min(0), n // 2
        wide = (
            (behind.clamp_min(1).float() / exact).log()
            / math.log(self.max_distance / exact)
            * (n - exact)
        )
        return ahead + torch.where(behind < exact, behind, (exact + wide.long()).clamp_max(n - 1))

    def forward(self, L: int, S: int, offset: int) -> Tensor:
        """Returns the bias (1, N, L, S) of L queries from position `offset` on and S keys."""
        # One row is gathered for each distance, from one below the least to the greatest, and each
        # query reads a window of these rows. A gather of (L, S) rows would sum their gradients in
        # an unspecified order.
        distances = torch.arange(-offset - L, S - offset, device=self.weight.device)
        rows = F.embedding(self.buckets(distances), self.weight)  # (L + S, N)
        return _windows(rows.T, L, S)[None]

    def extra_repr(self) -> str:
        return (
            f"{self.weight.size(1)}, {self.num_buckets}, {self.max_distance}, "
            f"bidirectional={self.bidirectional}"
        )


def _windows(rows: Tensor, L: int, S: int) -> Tensor:
    """Returns (N, L, S) from rows (N, L + S): of query i the S columns from L - i on.

    Copies of a row of L + S + 1 columns, read from column L on as rows of one column less, are
    shifted by one column from each to the next. `Tensor.unfold` would fix S in a compiled graph.
    """
    copies = F.pad(rows, (0, 1))[:, None].expand(-1, L, L + S + 1).flatten(1)
    return copies[:, L:].view(rows.size(0), L, L + S)[..., :S]


class RelativeKeys(RelativePositions):
    """Relative position representations of the keys (Shaw et al., 2018, equation 4).

    For query i, a learned vector of the distance j - i, clipped to [-max_distance, max_distance],
    is added to key j. All heads share the vectors.

    max_distance: K    head_dim: D    device, dtype: of the parameter, as in torch
    The parameter `weight` is (2K + 1, D), Xavier uniform.
    forward: -> weight, for any lengths
    Errors: ValueError for max_distance below 0 or head_dim below 1.
    """

    argument = "relative_keys"

    def __init__(
        self,
        max_distance: int,
        head_dim: int,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        if max_distance < 0 or head_dim < 1:
            raise ValueError(
                "RelativeKeys: max_distance must be at least 0 and head_dim at least 1, got "
                f"{max_distance} and {head_dim}"
            )
        self.weight = nn.Parameter(
            torch.empty(2 * max_distance + 1, head_dim, device=device, dtype=dtype)
        )
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draws the weight from Xavier's uniform distribution."""
        nn.init.xavier_uniform_(self.weight)

    def forward(self, L: int, S: int, offset: int) -> Tensor:
        """Returns the vectors of all distances, (2K + 1, D)."""
        return self.weight

    def extra_repr(self) -> str:
        return f"{len(self.weight) // 2}, {self.weight.size(1)}"


class Rotary(ConstantTable, RelativePositions):
    """Rotary position embedding (Su et al., 2021).

    Pair m of a query or key at position p is rotated by p * base^(-2m / R), so that a logit depends
    on the distance alone.

    head_dim: D    base: of the angles
    interleaved: whether pair m is (x_2m, x_2m+1), as in the paper and in GPT-J, or (x_m, x_m+R/2),
        the "rotate half" of GPT-NeoX and Llama
    rotary_dim: R, even, the elements of a head that are rotated, the first ones; by default D. With
        fewer than D it is the partial rotary embedding of GPT-NeoX and GPT-J
    max_positions: initial number of rows of the table, which grows when more are needed
    device: of the table
    forward: -> (P, R) fp32, cosines and sines in alternation, P at least the number of positions
    Errors: ValueError for an odd number of rotated elements, or one that is not in [2, D]; in a
    call, for more queries than keys where the last ones stand at one position.
    """

    argument = "rope"

    def __init__(
        self,
        head_dim: int,
        *,
        base: float = 10000.0,
        interleaved: bool = True,
        rotary_dim: int | None = None,
        max_positions: int = 512,
        device: torch.device | str | None = None,
    ) -> None:
        if rotary_dim is None and (head_dim < 2 or head_dim % 2):
            raise ValueError(
                "Rotary: head_dim must be even and at least 2 unless rotary_dim is given, got "
                f"{head_dim}"
            )
        R = head_dim if rotary_dim is None else rotary_dim
        if R % 2 or not 2 <= R <= head_dim:
            raise ValueError(
                f"Rotary: rotary_dim must be even and in [2, head_dim] = [2, {head_dim}], got {R}"
            )
        self._head_dim, self._rotary_dim, self._base = head_dim, R, base
        self._interleaved = interleaved
        super().__init__(max_positions, device)

    def _compute(self, rows: int) -> Tensor:
        theta = angles(rows, self._rotary_dim, self._base)
        return torch.stack([theta.cos(), theta.sin()], dim=-1).flatten(1)

    def forward(self, L: int, S: int, offset: int) -> Tensor:
        """Returns the table of cosines and sines, (P, R), P >= max(S, offset + L)."""
        return self.at_least(max(S, offset + L))

    def options(self, L: int, S: int, offset: int) -> dict[str, Any]:
        """Returns the operator's arguments `rope` and `rope_interleaved`.

        Errors: ValueError for more queries than keys where the last ones stand at one position
        """
        if offset < 0:
            raise ValueError(
                "Rotary: there must be at least as many keys as queries, unless causal_alignment "
                f"is 'start', got {L} queries and {S} keys"
            )
        return {**super().options(L, S, offset), "rope_interleaved": self._interleaved}

    def extra_repr(self) -> str:
        settings = f"{self._head_dim}, base={self._base:g}"
        if self._rotary_dim != self._head_dim:
            settings += f", rotary_dim={self._rotary_dim}"
        return settings if self._interleaved else f"{settings}, interleaved=False"
