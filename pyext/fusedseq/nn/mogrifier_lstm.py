"""The multi-layer Mogrifier LSTM over `mogrifier_lstm` and `mogrifier_lstm_pair`."""

import math
from collections.abc import Sequence
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn

from fusedseq import fused
from fusedseq.fused import check
from fusedseq.nn.dropout import check_probability, draw_seed
from fusedseq.nn.operators import Operators, shown_options
from fusedseq.nn.recurrent import Output, Recurrent
from fusedseq.nn.recurrent_parameters import GATE_PARAMETERS
from fusedseq.nn.recurrent_settings import Order, RecurrentSettings
from fusedseq.nn.recurrent_state import LayerState

ROUND_PARAMETERS = ("Q", "R", "Q_A", "Q_B", "R_A", "R_B", "Q_bias", "R_bias")


class MogrifierLSTM(Recurrent):
    """A multi-layer Mogrifier LSTM (Melis et al., 2020).

    input_size: X    hidden_size: H of all layers, or a list with one size for each
    num_layers: at least 1    bias: whether the gates have biases
    rounds: the number of rounds in which x and h gate each other before a step; with 0 this is an
        LSTM
    rank: the rank of each round's weight, which is then the product of two factors; None for a
        weight of full rank
    mogrifier_bias: whether each round has a bias
    share_rounds: whether all rounds on x share one weight Q, and all rounds on h one weight R
    cap_input_gate: whether the input gate is min(i, 1 - f), as in the paper's code
    input_dropout: probability that an element of the first layer's input is dropped in training
        mode
    dropout: the same for the inputs of the other layers
    locked_input: whether both have one mask for all time steps, as in AWD-LSTM, or one for each
        step, as in the paper
    state_dropout: probability that an element of h is dropped before the rounds, by one mask for
        all time steps
    zoneout_h, zoneout_c: probability that a unit keeps its previous h (c) at a step (Krueger et
        al., 2017); in eval mode the new state is the expectation
    weight_drop, variational, residual, output, batch_first, bidirectional, forget_bias, device,
        dtype, ops: as in `LSTM`
    Errors: as in `LSTM`, and a ValueError for rounds outside [0, 64) and for a rank below 1.
    """

    PARAMETERS = (*GATE_PARAMETERS, *ROUND_PARAMETERS)

    def __init__(
        self,
        input_size: int,
        hidden_size: int | Sequence[int],
        num_layers: int = 1,
        bias: bool = True,
        *,
        rounds: int = 5,
        rank: int | None = None,
        mogrifier_bias: bool = True,
        share_rounds: bool = False,
        cap_input_gate: bool = False,
        input_dropout: float = 0.0,
        dropout: float = 0.0,
        locked_input: bool = True,
        state_dropout: float = 0.0,
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
            weight_drop=weight_drop,
            variational=variational,
            residual=residual,
            output=output,
            zoneout_h=zoneout_h,
            zoneout_c=zoneout_c,
            batch_first=batch_first,
            bidirectional=bidirectional,
            device=device,
            dtype=dtype,
        )
        super().__init__(settings)
        flags = {
            "mogrifier_bias": mogrifier_bias,
            "share_rounds": share_rounds,
            "cap_input_gate": cap_input_gate,
            "locked_input": locked_input,
        }
        for name, value in flags.items():
            check.flag("MogrifierLSTM", name, value)
        rounds = check.whole_number("MogrifierLSTM", "rounds", rounds)
        if rank is not None:
            rank = check.whole_number("MogrifierLSTM", "rank", rank, ", or None for full rank")
        if not 0 <= rounds < 64:
            raise ValueError(
                f"MogrifierLSTM: rounds must be a whole number in [0, 64), got {rounds}"
            )
        if rank is not None and rank < 1:
            raise ValueError(
                f"MogrifierLSTM: rank must be at least 1, or None for full rank, got {rank}"
            )
        self.rounds, self.rank, self.cap_input_gate = rounds, rank, cap_input_gate
        self.mogrifier_bias, self.share_rounds = mogrifier_bias, share_rounds
        self.locked_input, self.forget_bias = locked_input, forget_bias
        self.input_dropout = check_probability(input_dropout, "MogrifierLSTM", "input_dropout")
        self.dropout = check_probability(dropout, "MogrifierLSTM", "dropout")
        self.state_dropout = check_probability(state_dropout, "MogrifierLSTM", "state_dropout")
        self._mogrifier_lstm = ops.mogrifier_lstm
        self._dropout, self._locked_dropout = ops.dropout, ops.locked_dropout
        self._mogrifier_lstm_pair = ops.mogrifier_lstm_pair
        self._add_round_parameters(settings, mogrifier_bias, share_rounds)
        self.reset_parameters()

    def _add_round_parameters(
        self, settings: RecurrentSettings, mogrifier_bias: bool, share_rounds: bool
    ) -> None:
        for l, (X, H) in enumerate(self.sizes):
            for reverse in self._directions():
                # Even rounds gate x (X wide) with h and Q, odd rounds gate h (H wide) with x and R.
                for name, n, out, in_ in (
                    ("Q", (self.rounds + 1) // 2, X, H),
                    ("R", self.rounds // 2, H, X),
                ):
                    n = min(n, 1) if share_rounds else n
                    if n == 0:
                        continue
                    if self.rank is None:
                        self._add(name, l, (n, out, in_), settings, reverse)
                    else:
                        self._add(f"{name}_A", l, (n, out, self.rank), settings, reverse)
                        self._add(f"{name}_B", l, (n, self.rank, in_), settings, reverse)
                    if mogrifier_bias:
                        self._add(f"{name}_bias", l, (n, out), settings, reverse)

    def reset_parameters(self, forget_bias: float | None = None) -> None:
        """Draws the gate parameters and full-rank round weights as torch.nn.LSTM its weights.

        Low-rank factors are drawn from a normal distribution with standard deviation
        (1 / (fan_in * rank))**(1/4), truncated at two standard deviations, and round biases are 0
        (Melis et al., 2020), so that a round is initially the identity in expectation.
        forget_bias: the bias of the forget gate; by default the constructor's
        """
        super().reset_parameters(forget_bias)
        for l, (_, H) in enumerate(self.sizes):
            for reverse in self._directions():
                for name in ROUND_PARAMETERS:
                    self._reset_round_parameter(name, l, H, reverse)

    def _reset_round_parameter(self, name: str, l: int, H: int, reverse: bool) -> None:
        if name.endswith("bias"):
            self._reset(name, l, reverse, nn.init.zeros_)
        elif self.rank is None:
            bound = 1 / math.sqrt(H)
            self._reset(name, l, reverse, partial(nn.init.uniform_, a=-bound, b=bound))
        elif (second_factor := self._parameter(f"{name[0]}_B", l, reverse)) is not None:
            std = (1 / (second_factor.size(-1) * self.rank)) ** 0.25
            fill = partial(nn.init.trunc_normal_, std=std, a=-2 * std, b=2 * std)
            self._reset(name, l, reverse, fill)

    def _round_weight(
        self, name: str, l: int, reverse: bool
    ) -> Tensor | tuple[Tensor, Tensor] | None:
        """Returns Q or R of a layer as the operator takes it: a tensor or a pair of factors."""
        if self.rank is None:
            return self._parameter(name, l, reverse)
        A, B = (self._parameter(f"{name}_{factor}", l, reverse) for factor in "AB")
        return None if A is None or B is None else (A, B)

    def _layer_arguments(
        self, l: int, reverse: bool, device: torch.device, state: LayerState, order: Order
    ) -> dict[str, Any]:
        """Returns all arguments of `mogrifier_lstm` for one direction of a layer except x."""
        randomness = self._randomness(device, self.input_dropout, self.dropout, self.state_dropout)
        h, c = state
        return {
            **self._gates(l, reverse),
            "h0": h,
            "c0": c,
            "Q": self._round_weight("Q", l, reverse),
            "R": self._round_weight("R", l, reverse),
            "Q_bias": self._parameter("Q_bias", l, reverse),
            "R_bias": self._parameter("R_bias", l, reverse),
            "rounds": self.rounds,
            **order.arguments(reverse),
            "cap_input_gate": self.cap_input_gate,
            # Both directions of a layer read the same input: see _layer_input.
            "input_dropout": 0.0 if self.bidirectional else self._input_dropout_of(l),
            "locked_input": self.locked_input,
            "state_dropout": self.state_dropout,
            **randomness,
        }

    def _input_dropout_of(self, l: int) -> float:
        return self.dropout if l else self.input_dropout

    def _layer_input(self, l: int, x: Tensor) -> Tensor:
        p = self._input_dropout_of(l)
        if not (self.bidirectional and self.training and p):
            return x
        drop = self._locked_dropout if self.locked_input else self._dropout
        dropped: Tensor = drop(x, p, draw_seed(x.device))
        return dropped

    def _run_direction(
        self, l: int, reverse: bool, x: Tensor, state: LayerState, order: Order
    ) -> tuple[Tensor, LayerState]:
        arguments = self._layer_arguments(l, reverse, x.device, state, order)
        return self._mogrifier_lstm(x, **arguments)

    def _run_layers(
        self, l: int, x: Tensor, states: Sequence[LayerState], order: Order
    ) -> Sequence[Output]:
        # Two layers are called together, because CUDA may run them concurrently. A residual layer
        # also reads the output two layers below it, which the pair operator does not take.
        if self.bidirectional or self.residual or l + 1 == self.num_layers:
            return super()._run_layers(l, x, states, order)
        below, above = (
            self._layer_arguments(i, False, x.device, states[i], order) for i in (l, l + 1)
        )
        return [(y, [state]) for y, state in self._mogrifier_lstm_pair(x, below, above)]

    def extra_repr(self) -> str:
        return shown_options(self)
