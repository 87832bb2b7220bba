"""The multi-layer LSTM over the operators `lstm` and `bidirectional_lstm`."""

from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from fusedseq import fused
from fusedseq.nn.layer_dropout import RecurrentWithDropout
from fusedseq.nn.operators import Operators
from fusedseq.nn.recurrent import Output
from fusedseq.nn.recurrent_settings import Order, RecurrentSettings
from fusedseq.nn.recurrent_state import LayerState


class LSTM(RecurrentWithDropout):
    """A multi-layer LSTM with the regularization of AWD-LSTM (Merity et al., 2018).

    With the default options it computes what torch.nn.LSTM computes, whose `state_dict` it loads.

    input_size: X    hidden_size: H of all layers, or a list with one size for each
    num_layers: at least 1    bias: whether the gates have biases
    dropout: probability that an element of the input of a layer is dropped in training mode, for
        each layer but the first
    locked_input: whether that dropout has one mask for all time steps, as in AWD-LSTM, or one for
        each step, as torch.nn.LSTM
    zoneout_h, zoneout_c: probability that a unit keeps its previous h (c) at a step (Krueger et
        al., 2017); in eval mode the new state is the expectation
    weight_drop: probability that an element of W_hh is dropped in training mode, by one mask for
        all time steps
    variational: whether the mask of weight_drop has one value per row of W_hh, not one per element
    residual: whether each layer above the first reads the sum of the outputs of the two layers
        below it; for the second layer these are the first layer's output and x
    output: "last" for the output of the last layer, "sum" for the sum of all layers' outputs
    batch_first: whether x and y are (B, T, X) and (B, T, H), not (T, B, X) and (T, B, H)
    bidirectional: whether each layer also reads the sequence from its end to its start, with
        parameters of its own, named as torch.nn.LSTM's; y then has both outputs
    proj_size: with P > 0, h is the projection of the cell's output to P numbers by a weight (P, H)
        (Sak et al., 2014), as in torch.nn.LSTM; c still has H
    forget_bias: the initial bias of the forget gate; None draws it as torch.nn.LSTM
    device, dtype: of the parameters, as in torch    ops: `fusedseq.fused` or `fusedseq.reference`
    Errors: ValueError for sizes below 1, sizes that residual or output='sum' do not allow,
    probabilities outside [0, 1], and zoneout_h together with proj_size; TypeError for sizes that
    are not whole numbers and flags that are not bools.
    """

    mode = "LSTM"  # as torch.nn.LSTM has it
    _projected_lstm = staticmethod(fused.projected_lstm)  # of modules that older versions pickled

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
        proj_size: int = 0,
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
            proj_size=proj_size,
        )
        super().__init__(settings, dropout, locked_input, ops)
        if proj_size and zoneout_h:
            raise ValueError(
                "LSTM: zoneout_h must be 0 with proj_size, which carries a projection of h, got "
                f"{zoneout_h}"
            )
        self.forget_bias = forget_bias
        self._lstm, self._projected_lstm = ops.lstm, ops.projected_lstm
        self._bidirectional_lstm = ops.bidirectional_lstm
        self.reset_parameters()

    def _run_layers(
        self, l: int, x: Tensor, states: Sequence[LayerState], order: Order
    ) -> Sequence[Output]:
        zoned = self.zoneout_h or self.zoneout_c  # which the operator of both directions lacks
        is_known = hasattr(self, "_bidirectional_lstm")  # not in modules of an older version
        if not self.bidirectional or self.proj_size or zoned or not is_known:
            return super()._run_layers(l, x, states, order)
        x = self._layer_input(l, x)
        arguments: dict[str, Any] = {"lengths": order.lengths}
        for reverse, suffix in ((False, ""), (True, "_reverse")):
            h, c = states[2 * l + reverse]
            random = self._randomness(x.device)
            own = self._gates(l, reverse) | {"h0": h, "c0": c, "seed": random["seed"]}
            own["starts"] = order.arguments(reverse)["starts"]
            arguments |= {f"{name}{suffix}": value for name, value in own.items()}
            arguments |= {name: random[name] for name in ("weight_drop", "variational", "training")}
        y, final = self._bidirectional_lstm(x, **arguments)
        return [(y, final)]

    def _run_direction(
        self, l: int, reverse: bool, x: Tensor, state: LayerState, order: Order
    ) -> tuple[Tensor, LayerState]:
        h, c = state
        arguments = self._gates(l, reverse) | {"h0": h, "c0": c} | order.arguments(reverse)
        arguments |= self._randomness(x.device)
        W_hr = self._parameter("weight_hr", l, reverse)
        if W_hr is None:
            return self._lstm(x, **arguments)
        del arguments["zoneout_h"]  # which is 0
        return self._projected_lstm(x, W_hr=W_hr, **arguments)
