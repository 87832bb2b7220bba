"""The multi-layer simple recurrent network over the operator `rnn`."""

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

from fusedseq import fused
from fusedseq.nn.layer_dropout import RecurrentWithDropout
from fusedseq.nn.operators import Operators
from fusedseq.nn.recurrent_settings import Order, RecurrentSettings
from fusedseq.nn.recurrent_state import LayerState


class RNN(RecurrentWithDropout):
    """A multi-layer simple recurrent network (Elman, 1990).

    With the default options it computes what torch.nn.RNN computes, whose `state_dict` it loads.
    Its state is h.

    input_size: X    hidden_size: H of all layers, or a list with one size for each
    num_layers: at least 1
    nonlinearity: "tanh" or "relu", of the state's pre-activation
    bias: whether the state's pre-activation has biases
    dropout, locked_input, zoneout_h, weight_drop, variational, residual, output, batch_first,
        bidirectional, device, dtype, ops: as in `LSTM`
    Errors: as in `LSTM`, and a ValueError for another nonlinearity.
    """

    GATES = 1
    STATE = ("h",)

    def __init__(
        self,
        input_size: int,
        hidden_size: int | Sequence[int],
        num_layers: int = 1,
        nonlinearity: Literal["tanh", "relu"] = "tanh",
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
        if nonlinearity not in ("tanh", "relu"):
            raise ValueError(f"RNN: nonlinearity must be 'tanh' or 'relu', got {nonlinearity!r}")
        self.nonlinearity = nonlinearity
        self._rnn = ops.rnn
        self.reset_parameters()

    @property
    def mode(self) -> str:
        """RNN_TANH or RNN_RELU, as torch.nn.RNN has it."""
        return f"RNN_{self.nonlinearity.upper()}"

    def _run_direction(
        self, l: int, reverse: bool, x: Tensor, state: LayerState, order: Order
    ) -> tuple[Tensor, LayerState]:
        arguments = self._gates(l, reverse) | {"h0": state[0]} | order.arguments(reverse)
        y, h = self._rnn(
            x, **arguments, **self._randomness(x.device), relu=self.nonlinearity == "relu"
        )
        return y, (h,)
