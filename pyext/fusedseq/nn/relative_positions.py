"""What attention adds to its logits or turns its operands by, for `MultiheadAttention(positions=...)`.

Called with the numbers of queries and keys and the position of the first query, such a module gives the tensor for
attention's argument `argument`. Several layers may share one.
"""

import math

import torch
from torch import nn
from torch.nn import functional as F

from fusedseq.nn.constant_table import ConstantTable, angles


class ALiBi(ConstantTable):
    """Attention with linear biases (Press et al., 2022): slope_n * distance is subtracted from the logits of head n.

    num_heads: N. The slopes are 2^(-8/N), 2^(-16/N), ..., 2^-8 for a power of two; for other N those of the power of two
    below and, for the rest of the heads, every other one of twice that power (the authors' code).
    forward: -> (N,) fp32, whatever the lengths
    """

    argument = "alibi"

    def __init__(self, num_heads, *, device=None):
        if num_heads < 1:
            raise ValueError(f"ALiBi: num_heads must be at least 1, got {num_heads}")
        super().__init__(num_heads, device)

    def _compute(self, heads):
        power = 2 ** (heads.bit_length() - 1)
        slopes = [2 ** (-8 * n / power) for n in range(1, power + 1)]
        between = [2 ** (-4 * n / power) for n in range(1, 2 * power, 2)]
        return torch.tensor([*slopes, *between][:heads], dtype=torch.float64)

    def forward(self, L, S, offset):
        return self.table


class RelativeBias(nn.Module):
    """T5's relative bias (Raffel et al., 2020, section 2.1): a learnt scalar per head for each bucket of distances.

    num_heads: N    num_buckets: half of them for near distances, one each, the others for logarithmically wider ranges
    up to max_distance, the last for all beyond    bidirectional: half of all for keys ahead of the query; without it, as in
    T5's decoder, these are at distance 0
    `weight` is (num_buckets, N), T5's relative_attention_bias, Xavier uniform.
    forward: -> (1, N, L, S); its gradient is summed in a fixed order
    """

    argument = "bias"

    def __init__(self, num_heads, num_buckets=32, max_distance=128, *, bidirectional=True, device=None, dtype=None):
        super().__init__()
        exact = num_buckets // (4 if bidirectional else 2)
        if num_heads < 1 or exact < 1 or max_distance <= exact:
            raise ValueError(
                "RelativeBias: num_heads must be at least 1, num_buckets at least 2 (4 if bidirectional) and max_distance "
                f"above the {exact} that have a bucket each, got {num_heads}, {num_buckets} and {max_distance}"
            )
        self.num_buckets, self.max_distance, self.bidirectional = num_buckets, max_distance, bidirectional
        self.weight = nn.Parameter(torch.empty(num_buckets, num_heads, device=device, dtype=dtype))
        self.reset_parameters()

    def reset_parameters(self):
        nn.init.xavier_uniform_(self.weight)

    def buckets(self, distances):
        """The bucket of each distance j - i (int64): rounded in fp32, as T5 does."""
        n, behind = self.num_buckets, -distances
        ahead = torch.zeros_like(distances)
        if self.bidirectional:
            n //= 2
            ahead, behind = n * (distances > 0), behind.abs()
        behind, exact = behind.clamp_min(0), n // 2
        wide = (behind.clamp_min(1).float() / exact).log() / math.log(self.max_distance / exact) * (n - exact)
        return ahead + torch.where(behind < exact, behind, (exact + wide.long()).clamp_max(n - 1))

    def forward(self, L, S, offset):
        # One row for each distance that there is, then every query's window of them: gathering (L, S) rows instead would
        # add their gradients in any order.
        distances = torch.arange(-offset - L + 1, S - offset, device=self.weight.device)
        rows = F.embedding(self.buckets(distances), self.weight)  # (L + S - 1, N), the last query's first
        return rows.T.unfold(1, S, 1).flip(1)[None]

    def extra_repr(self):
        return f"{self.weight.size(1)}, {self.num_buckets}, {self.max_distance}, bidirectional={self.bidirectional}"


class RelativeKeys(nn.Module):
    """Relative position representations of the keys (Shaw et al., 2018, equation 4): a learnt vector for each distance
    j - i, clipped to [-max_distance, max_distance], is added to key j for query i; all heads share it.

    max_distance: K    head_dim: D    `weight` is (2K + 1, D), Xavier uniform
    forward: -> weight, whatever the lengths
    """

    argument = "relative_keys"

    def __init__(self, max_distance, head_dim, *, device=None, dtype=None):
        super().__init__()
        if max_distance < 0 or head_dim < 1:
            raise ValueError(f"RelativeKeys: max_distance must be at least 0 and head_dim at least 1, got {max_distance} "
                             f"and {head_dim}")  # fmt: skip
        self.weight = nn.Parameter(torch.empty(2 * max_distance + 1, head_dim, device=device, dtype=dtype))
        self.reset_parameters()

    def reset_parameters(self):
        nn.init.xavier_uniform_(self.weight)

    def forward(self, L, S, offset):
        return self.weight

    def extra_repr(self):
        return f"{len(self.weight) // 2}, {self.weight.size(1)}"


class Rotary(ConstantTable):
    """Rotary positions (Su et al., 2021): the pair (x_2m, x_2m+1) of queries and keys at position p is turned by
    p * base^(-2m / D), so that a logit depends on distance alone.

    head_dim: D, even    base: of the angles    max_positions: that the table starts with; it grows when more are asked for
    forward: -> (P, D) fp32, cos and sin in turn, P at least the positions there are
    """

    argument = "rope"

    def __init__(self, head_dim, *, base=10000.0, max_positions=512, device=None):
        if head_dim < 2 or head_dim % 2:
            raise ValueError(f"Rotary: head_dim must be even and at least 2, got {head_dim}")
        self._size = head_dim, base
        super().__init__(max_positions, device)

    def _compute(self, positions):
        turned = angles(positions, *self._size)
        return torch.stack([turned.cos(), turned.sin()], dim=-1).flatten(1)

    def forward(self, L, S, offset):
        return self.reach(max(S, offset + L))

    def extra_repr(self):
        return "{}, base={:g}".format(*self._size)
