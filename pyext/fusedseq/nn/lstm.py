"""The multi-layer LSTM over the operator `lstm`."""

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

from fusedseq import fused
from fusedseq.nn.dropout import Dropout, LockedDropout
from fusedseq.nn.operators import LayerOutput, Operators, shown_options
from fusedseq.nn.recurrent import Recurrent, RecurrentSettings, States


class LSTM(Recurrent):
    """A multi-layer LSTM with the regularization of AWD-LSTM (Merity et al., 2018).

    Without dropout and weight drop it computes what torch.nn.LSTM computes, whose `state_dict` it
    loads.

    input_size: X    hidden_size: H of all layers, or a list with one size for each
    num_layers: at least 1    bias: whether the gates have biases
    dropout: probability that an element of the input of a layer is dropped in training mode, for
        each layer but the first
    locked_input: whether that dropout has one mask for all time steps, as in AWD-LSTM, or one for
        each step, as torch.nn.LSTM
    weight_drop: probability that an element of W_hh is dropped in training mode, by one mask for
        all time steps
    variational: whether the mask of weight_drop has one value per row of W_hh, not one per element
    residual: whether each layer above the first reads the sum of the outputs of the two layers
        below it; for the second layer these are the first layer's output and x
    output: "last" for the output of the last layer, "sum" for the sum of all layers' outputs
    batch_first: whether x and y are (B, T, X) and (B, T, H), not (T, B, X) and (T, B, H)
    forget_bias: the initial bias of the forget gate; None draws it as torch.nn.LSTM
    ops: `fusedseq.fused` or `fusedseq.reference`
    Errors: ValueError for sizes below 1, sizes that residual or output='sum' do not allow, and
    probabilities outside [0, 1].
    """

    def __init__(
        self,
        input_size: int,
        hidden_size: int | Sequence[int],
        num_layers: int = 1,
        bias: bool = True,
        *,
        dropout: float = 0.0,
        locked_input: bool = True,
        weight_drop: float = 0.0,
        variational: bool = False,
        residual: bool = False,
        output: Literal["last", "sum"] = "last",
        batch_first: bool = False,
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
            weight_drop=weight_drop,
            variational=variational,
            residual=residual,
            output=output,
            batch_first=batch_first,
            device=device,
            dtype=dtype,
        )
        super().__init__(settings)
        self.layer_dropout = (LockedDropout if locked_input else Dropout)(dropout, ops=ops)
        self.forget_bias = forget_bias
        self._lstm = ops.lstm
        self.reset_parameters()

    def _run_layers(
        self, l: int, x: Tensor, state: States, lengths: Tensor | None
    ) -> Sequence[LayerOutput]:
        if l > 0:
            x = self.layer_dropout(x)
        h, c = state
        arguments = self._gates(l) | {"h0": h[l], "c0": c[l], "lengths": lengths}
        return [self._lstm(x, **arguments, **self._randomness(x.device))]

    def extra_repr(self) -> str:
        dropout = self.layer_dropout
        return shown_options(
            self, dropout=dropout.p, locked_input=isinstance(dropout, LockedDropout)
        )
