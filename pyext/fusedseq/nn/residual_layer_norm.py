"""The module over the operator `residual_layer_norm`."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from fusedseq import fused
from fusedseq.fused import check
from fusedseq.nn.dropout import check_probability, draw_seed
from fusedseq.nn.operators import Operators, shown_options


class ResidualLayerNorm(nn.Module):
    """LayerNorm(residual + dropout(x)) in one pass.

    This connects the sublayers of a Transformer (Vaswani et al., 2017).
    normalized_shape: D, or a sequence that holds D alone; the last dimension is normalized
    dropout: probability of dropping an element of x in training mode
    eps: added to the variance, at least 0
    bias: as in torch.nn.LayerNorm, whose state dict this module loads
    elementwise_affine: False for neither weight nor bias
    prenorm: forward also returns s = residual + dropout(x), the next residual (Wang et al., 2019)
    device, dtype: of the parameters, as in torch    ops: `fusedseq.fused` or `fusedseq.reference`
    forward: x (..., D), residual (..., D) or None -> y (..., D), or y and s with `prenorm`
    Errors: ValueError for a normalized_shape of more dimensions or below 0, a dropout outside
    [0, 1] or a negative eps.
    """

    weight: nn.Parameter | None
    bias: nn.Parameter | None

    def __init__(
        self,
        normalized_shape: int | Sequence[int],
        dropout: float = 0.0,
        *,
        eps: float = 1e-5,
        elementwise_affine: bool = True,
        bias: bool = True,
        prenorm: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        ops: Operators = fused,
    ) -> None:
        super().__init__()
        self.normalized_shape = width = last_dimension(normalized_shape)
        check.at_least_zero("ResidualLayerNorm", "eps", eps)
        self.eps, self.prenorm = eps, prenorm
        self.dropout = check_probability(dropout, "ResidualLayerNorm", "dropout")
        present = {"weight": elementwise_affine, "bias": elementwise_affine and bias}
        for name, is_present in present.items():
            values = torch.empty(width, device=device, dtype=dtype)
            self.register_parameter(name, nn.Parameter(values) if is_present else None)
        self._residual_layer_norm = ops.residual_layer_norm
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Sets the weight to 1 and the bias to 0."""
        if self.weight is not None:
            nn.init.ones_(self.weight)
        if self.bias is not None:
            nn.init.zeros_(self.bias)

    def forward(self, x: Tensor, residual: Tensor | None = None) -> Tensor | tuple[Tensor, Tensor]:
        """Normalizes residual + dropout(x), both (..., D).

        returns y (..., D); with `prenorm`, y and s = residual + dropout(x)
        """
        dropping: dict[str, Any] = (
            {"p": self.dropout, "seed": draw_seed(x.device)}
            if self.training and self.dropout
            else {}
        )
        result: Tensor | tuple[Tensor, Tensor] = self._residual_layer_norm(
            x, residual, self.weight, self.bias, eps=self.eps, prenorm=self.prenorm, **dropping
        )
        return result

    def extra_repr(self) -> str:
        affine = self.weight is not None
        return shown_options(
            self, elementwise_affine=affine, bias=self.bias is not None or not affine
        )


def last_dimension(normalized_shape: Any) -> int:
    """Returns D of an int D or of a sequence (D,), as torch.nn.LayerNorm takes them."""
    sizes = [normalized_shape] if isinstance(normalized_shape, int) else list(normalized_shape)
    if len(sizes) != 1 or not isinstance(sizes[0], int) or sizes[0] < 0:
        raise ValueError(
            "ResidualLayerNorm: normalized_shape must be the size of the last dimension, an int of "
            f"at least 0, got {normalized_shape!r}"
        )
    return sizes[0]
