"""Dropout modules. In training mode forward draws a new seed from torch's default generator."""

import torch
from torch import Tensor, nn

from fusedseq import fused
from fusedseq.fused import check
from fusedseq.nn.operators import Operators, shown_options


def draw_seed(device: torch.device) -> Tensor:
    """Returns a new seed, a scalar int64 tensor, from the default generator of `device`.

    `torch.manual_seed` makes it reproducible, and no value is read back from the device.
    """
    return torch.randint(2**63 - 1, (), dtype=torch.int64, device=device)


def check_probability(p: float, module: str, name: str = "p") -> float:
    """Returns p; raises TypeError or ValueError, naming the module and the argument, unless it is a
    number in [0, 1].
    """
    check.probability(module, name, p)
    return p


class _Dropout(nn.Module):
    """Applies `_drop` in training mode; the identity in eval mode and for p = 0."""

    def __init__(self, p: float) -> None:
        super().__init__()
        self.p = check_probability(p, type(self).__name__)

    def _drop(self, x: Tensor, seed: Tensor) -> Tensor:
        raise NotImplementedError

    def extra_repr(self) -> str:
        return shown_options(self, "p")

    def forward(self, x: Tensor) -> Tensor:
        """Returns x with random elements dropped in training mode, and x itself in eval mode."""
        if not self.training or self.p == 0:
            return x
        return self._drop(x, draw_seed(x.device))


class Dropout(_Dropout):
    """Drops each element with probability `p` and scales the others by 1/(1-p), in training mode.

    p: in [0, 1]    ops: `fusedseq.fused` or `fusedseq.reference`
    The input may have any shape. In eval mode the module is the identity.
    Errors: TypeError for a p that is not a number; ValueError for p outside [0, 1].
    """

    def __init__(self, p: float = 0.5, *, ops: Operators = fused) -> None:
        super().__init__(p)
        self._dropout = ops.dropout

    def _drop(self, x: Tensor, seed: Tensor) -> Tensor:
        return self._dropout(x, self.p, seed)


class LockedDropout(_Dropout):
    """Dropout with one (B, D) mask for all time steps of a (T, B, D) input (Merity et al., 2018).

    p: probability in [0, 1] that an element is dropped in training mode    ops: as of `Dropout`
    In eval mode the module is the identity.
    Errors: those of `Dropout`; ValueError in forward for an input that is not (T, B, D).
    """

    def __init__(self, p: float = 0.5, *, ops: Operators = fused) -> None:
        super().__init__(p)
        self._locked_dropout = ops.locked_dropout

    def _drop(self, x: Tensor, seed: Tensor) -> Tensor:
        return self._locked_dropout(x, self.p, seed)


class WeightDrop(_Dropout):
    """DropConnect on a (rows, columns) weight (Merity et al., 2018); the identity in eval mode.

    The parameter itself is not modified and receives the gradient: a model computes
    `w = drop(self.weight)` in its forward and uses `w` there.
    p: probability in [0, 1] that an element, or with `variational` a row, is dropped
    variational: whether the mask has one value for each row, not one for each element
    ops: as of `Dropout`
    Errors: those of `Dropout`; ValueError in forward for an input that is not (rows, columns).
    """

    def __init__(
        self, p: float = 0.5, variational: bool = False, *, ops: Operators = fused
    ) -> None:
        super().__init__(p)
        self.variational = variational
        self._weight_drop = ops.weight_drop

    def _drop(self, x: Tensor, seed: Tensor) -> Tensor:
        return self._weight_drop(x, self.p, seed, self.variational)
