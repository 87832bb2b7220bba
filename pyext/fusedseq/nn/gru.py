"""The multi-layer gated recurrent unit over the operator `gru`."""

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

from fusedseq import fused
from fusedseq.nn.layer_dropout import RecurrentWithDropout
from fusedseq.nn.operators import Operators
from fusedseq.nn.recurrent_settings import Order, RecurrentSettings
from fusedseq.nn.recurrent_state import LayerState


class GRU(RecurrentWithDropout):
    """A multi-layer gated recurrent unit (Cho et al., 2014).

    With the default options it computes what torch.nn.GRU computes, whose `state_dict` it loads.
    Its state is h.

    input_size: X    hidden_size: H of all layers, or a list with one size for each
    num_layers: at least 1    bias: whether the gates have biases
    dropout, locked_input, zoneout_h, weight_drop, variational, residual, output, batch_first,
        bidirectional, device, dtype, ops: as in `LSTM`
    Errors: as in `LSTM`.
    """

    GATES = 3
    STATE = ("h",)
    mode = "GRU"  # as torch.nn.GRU has it

    def __init__(
        self,
        input_size: int,
        hidden_size: int | Sequence[int],
        num_layers: int = 1,
        bias: bool = True,
        *,
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
        self._gru = ops.gru
        self.reset_parameters()

    def _bias(self, bias_ih: Tensor, bias_hh: Tensor) -> Tensor:
        return four_biases(bias_ih, bias_hh)

    def _run_direction(
        self, l: int, reverse: bool, x: Tensor, state: LayerState, order: Order
    ) -> tuple[Tensor, LayerState]:
        arguments = self._gates(l, reverse) | {"h0": state[0]} | order.arguments(reverse)
        y, h = self._gru(x, **arguments, **self._randomness(x.device))
        return y, (h,)


def four_biases(bias_ih: Tensor, bias_hh: Tensor) -> Tensor:
    """Returns b (4H,) of the operators from the biases (3H,) of the two products.

    The biases of the new gate stay apart, because the reset gate multiplies one of them.
    """
    H = len(bias_ih) // 3
    both = (bias_ih + bias_hh).narrow(0, 0, 2 * H)
    return torch.cat([both, bias_ih.narrow(0, 2 * H, H), bias_hh.narrow(0, 2 * H, H)])
