"""The multi-layer LSTM with layer normalization over the operator `layer_norm_lstm`."""

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor, nn

from fusedseq import fused
from fusedseq.fused import check
from fusedseq.fused.layer_norm_lstm import CELL
from fusedseq.nn.layer_dropout import RecurrentWithDropout
from fusedseq.nn.operators import Operators
from fusedseq.nn.recurrent_parameters import GATE_PARAMETERS
from fusedseq.nn.recurrent_settings import Order, RecurrentSettings
from fusedseq.nn.recurrent_state import LayerState

VECTORS = CELL.vectors  # {parameter: its elements for each hidden unit}


class LayerNormLSTM(RecurrentWithDropout):
    """A multi-layer LSTM with layer normalization (Ba et al., 2016) of the products with x and h,
    and of the cell state, as the library haste has it.

    Its parameters are those of `LSTM`, and for each layer gamma_ih (4H,), gamma_hh (4H,), gamma_c
    (H,) and beta_c (H,), first ones and zeros. bias_ih and bias_hh are the shifts of the two
    normalized products. On CUDA a loop over the steps computes it.

    input_size: X    hidden_size: H of all layers, or a list with one size for each
    num_layers: at least 1    bias: whether the gates have biases
    eps: added to the variances, at least 0
    dropout, locked_input, zoneout_h, zoneout_c, weight_drop, variational, residual, output,
        batch_first, bidirectional, forget_bias, device, dtype, ops: as in `LSTM`
    Errors: as in `LSTM`, and a ValueError for an eps below 0.
    """

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
        check.at_least_zero("LayerNormLSTM", "eps", eps)
        self.eps = eps
        for l, (_, H) in enumerate(self.sizes):
            for reverse in self._directions():
                for name, n in VECTORS.items():
                    self._add(name, l, (n * H,), settings, reverse)
        self.forget_bias = forget_bias
        self._layer_norm_lstm = ops.layer_norm_lstm
        self.reset_parameters()

    def reset_parameters(self, forget_bias: float | None = None) -> None:
        """Draws weights and biases as `LSTM`, and sets gamma_ih, gamma_hh and gamma_c to ones and
        beta_c to zeros.

        forget_bias: the bias of the forget gate; by default the constructor's
        Errors: ValueError for a forget_bias of parameters that are sharded among processes.
        """
        super().reset_parameters(forget_bias)
        for l in range(self.num_layers):
            for reverse in self._directions():
                for name in VECTORS:
                    fill = nn.init.zeros_ if name == "beta_c" else nn.init.ones_
                    self._reset(name, l, reverse, fill)

    def _run_direction(
        self, l: int, reverse: bool, x: Tensor, state: LayerState, order: Order
    ) -> tuple[Tensor, LayerState]:
        arguments = self._gates(l, reverse) | order.arguments(reverse)
        arguments |= {name: self._parameter(name, l, reverse) for name in VECTORS}
        arguments |= dict(zip(("h0", "c0"), state, strict=True)) | self._randomness(x.device)
        return self._layer_norm_lstm(x, **arguments, eps=self.eps)
