"""The multi-layer GRU with layer normalization over the operator `layer_norm_gru`."""

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor, nn

from fusedseq import fused
from fusedseq.fused import check
from fusedseq.fused.layer_norm_gru import CELL
from fusedseq.nn.gru import four_biases
from fusedseq.nn.layer_dropout import RecurrentWithDropout
from fusedseq.nn.operators import Operators
from fusedseq.nn.recurrent_parameters import GATE_PARAMETERS
from fusedseq.nn.recurrent_settings import Order, RecurrentSettings
from fusedseq.nn.recurrent_state import LayerState

VECTORS = CELL.vectors  # {parameter: its elements for each hidden unit}


class LayerNormGRU(RecurrentWithDropout):
    """A multi-layer gated recurrent unit with layer normalization (Ba et al., 2016) of the products
    with x and h, as the library haste has it.

    Its parameters are those of `GRU`, and for each layer gamma_ih (3H,) and gamma_hh (3H,), first
    ones. The biases are added to the normalized products. Its state is h. On CUDA a loop over the
    steps computes it.

    input_size: X    hidden_size: H of all layers, or a list with one size for each
    num_layers: at least 1    bias: whether the gates have biases
    eps: added to the variances, at least 0
    dropout, locked_input, zoneout_h, weight_drop, variational, residual, output, batch_first,
        bidirectional, device, dtype, ops: as in `LSTM`
    Errors: as in `LSTM`, and a ValueError for an eps below 0.
    """

    GATES = 3
    STATE = ("h",)
    PARAMETERS = (*GATE_PARAMETERS, *VECTORS)

    def __init__(
        self,
        input_size: int,
        hidden_size: int | Sequence[int],
        num_layers: int = 1,
        bias: bool = True,
        *,
        eps: float = 1e-5,
        dropout: float = 0.0,
        locked_input: bool = True,
        zoneout_h: float = 0.0,
        weight_drop: float = 0.0,
        variational: bool = False,
        residual: bool = False,
        output: Literal["last", "sum"] = "last",
        batch_first: bool = False,
        bidirectional: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        ops: Operators = fused,
    ) -> None:
        settings = RecurrentSettings(
            input_size,
            hidden_size,
            num_layers,
            bias,
            zoneout_h=zoneout_h,
            weight_drop=weight_drop,
            variational=variational,
            residual=residual,
            output=output,
            batch_first=batch_first,
            bidirectional=bidirectional,
            device=device,
            dtype=dtype,
        )
        super().__init__(settings, dropout, locked_input, ops)
        check.at_least_zero("LayerNormGRU", "eps", eps)
        self.eps = eps
        for l, (_, H) in enumerate(self.sizes):
            for reverse in self._directions():
                for name, n in VECTORS.items():
                    self._add(name, l, (n * H,), settings, reverse)
        self._layer_norm_gru = ops.layer_norm_gru
        self.reset_parameters()

    def reset_parameters(self, forget_bias: float | None = None) -> None:
        """Draws weights and biases as `GRU`, and sets gamma_ih and gamma_hh to ones.

        forget_bias: must be None, as a GRU has no forget gate
        """
        super().reset_parameters(forget_bias)
        for l in range(self.num_layers):
            for reverse in self._directions():
                for name in VECTORS:
                    self._reset(name, l, reverse, nn.init.ones_)

    def _bias(self, bias_ih: Tensor, bias_hh: Tensor) -> Tensor:
        return four_biases(bias_ih, bias_hh)

    def _run_direction(
        self, l: int, reverse: bool, x: Tensor, state: LayerState, order: Order
    ) -> tuple[Tensor, LayerState]:
        arguments = self._gates(l, reverse) | {"h0": state[0]} | order.arguments(reverse)
        arguments |= {name: self._parameter(name, l, reverse) for name in VECTORS}
        y, h = self._layer_norm_gru(x, **arguments, **self._randomness(x.device), eps=self.eps)
        return y, (h,)
