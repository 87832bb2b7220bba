"""Dropout modules: each forward in training mode draws a new seed from torch's default generator."""

import torch
from torch import nn

from fusedseq import fused


def draw_seed(device):
    """A new seed from the default generator of `device`: `torch.manual_seed` reproduces it."""
    return torch.randint(2**63 - 1, (), dtype=torch.int64, device=device)


def check_probability(p, module, name="p"):
    if not 0 <= p <= 1:
        raise ValueError(f"{module}: {name} must be in [0, 1], got {p}")
    return p


class _Dropout(nn.Module):
    def __init__(self, p):
        super().__init__()
        self.p = check_probability(p, type(self).__name__)

    def extra_repr(self):
        return f"p={self.p}"

    def forward(self, x):
        if not self.training or self.p == 0:
            return x
        return self._op(x, self.p, draw_seed(x.device))


class Dropout(_Dropout):
    """Each element dropped with probability `p`, the rest scaled by 1/(1-p); the identity in eval mode. Any shape."""

    def __init__(self, p=0.5, *, ops=fused):
        super().__init__(p)
        self._op = ops.dropout


class LockedDropout(_Dropout):
    """One (B, D) mask for all time steps of a (T, B, D) input (Merity et al., 2018); the identity in eval mode."""

    def __init__(self, p=0.5, *, ops=fused):
        super().__init__(p)
        self._op = ops.locked_dropout


class WeightDrop(_Dropout):
    """DropConnect on a (rows, columns) weight (Merity et al., 2018); the identity in eval mode.

    The parameter stays raw and receives the gradient: `w = drop(self.weight)` in a forward, `w` used there.
    variational: one mask value per row.
    """

    def __init__(self, p=0.5, variational=False, *, ops=fused):
        super().__init__(p)
        self.variational = variational
        self._weight_drop = ops.weight_drop

    def _op(self, W, p, seed):
        return self._weight_drop(W, p, seed, self.variational)

    def extra_repr(self):
        return f"p={self.p}, variational={self.variational}"
