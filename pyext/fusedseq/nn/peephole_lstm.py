"""The multi-layer LSTM with peepholes over the operator `peephole_lstm`."""

import math
from collections.abc import Sequence
from functools import partial
from typing import Literal

import torch
from torch import Tensor, nn

from fusedseq import fused
from fusedseq.nn.layer_dropout import RecurrentWithDropout
from fusedseq.nn.operators import Operators
from fusedseq.nn.recurrent_parameters import GATE_PARAMETERS
from fusedseq.nn.recurrent_settings import Order, RecurrentSettings
from fusedseq.nn.recurrent_state import LayerState


class PeepholeLSTM(RecurrentWithDropout):
    """A multi-layer LSTM whose gates also read the cell state (Gers & Schmidhuber, 2000).

    Its parameters are those of `LSTM` and peephole_l<layer> (3H,) of the gates i, f and o.

    input_size: X    hidden_size: H of all layers, or a list with one size for each
    num_layers: at least 1    bias: whether the gates have biases
    dropout, locked_input, zoneout_h, zoneout_c, weight_drop, variational, residual, output,
        batch_first, bidirectional, forget_bias, device, dtype, ops: as in `LSTM`
    Errors: as in `LSTM`.
    """

    PARAMETERS = (*GATE_PARAMETERS, "peephole")

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
        zoneout_c: float = 0.0,
        weight_drop: float = 0.0,
        variational: bool = False,
        residual: bool = False,
        output: Literal["last", "sum"] = "last",
        batch_first: bool = False,
        bidirectional: bool = False,
        forget_bias: float | None = None,
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
            zoneout_c=zoneout_c,
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
        for l, (_, H) in enumerate(self.sizes):
            for reverse in self._directions():
                self._add("peephole", l, (3 * H,), settings, reverse)
        self.forget_bias = forget_bias
        self._peephole_lstm = ops.peephole_lstm
        self.reset_parameters()

    def reset_parameters(self, forget_bias: float | None = None) -> None:
        """Draws all parameters, the peepholes too, from U(-1/sqrt(H), 1/sqrt(H)).

        forget_bias: the bias of the forget gate; by default the constructor's
        Errors: ValueError for a forget_bias of parameters that are sharded among processes.
        """
        super().reset_parameters(forget_bias)
        for l, (_, H) in enumerate(self.sizes):
            for reverse in self._directions():
                bound = 1 / math.sqrt(H)
                self._reset("peephole", l, reverse, partial(nn.init.uniform_, a=-bound, b=bound))

    def _run_direction(
        self, l: int, reverse: bool, x: Tensor, state: LayerState, order: Order
    ) -> tuple[Tensor, LayerState]:
        arguments = self._gates(l, reverse) | order.arguments(reverse)
        arguments |= {name: self._parameter(name, l, reverse) for name in ("peephole",)}
        arguments |= dict(zip(("h0", "c0"), state, strict=True)) | self._randomness(x.device)
        return self._peephole_lstm(x, **arguments)
