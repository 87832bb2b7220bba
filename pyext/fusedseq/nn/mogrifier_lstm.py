"""The multi-layer Mogrifier LSTM over `mogrifier_lstm` and `mogrifier_lstm_pair`."""

import math
from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn

from fusedseq import fused
from fusedseq.nn.dropout import check_probability
from fusedseq.nn.operators import LayerOutput, Operators, shown_options
from fusedseq.nn.recurrent import Recurrent, RecurrentSettings, States


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
    weight_drop, variational, residual, output, batch_first, forget_bias, ops: as in
        `LSTM`
    Errors: ValueError as in `LSTM`, for rounds below 0 and for a rank below 1.
    """

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
        if rounds < 0:
            raise ValueError(f"MogrifierLSTM: rounds must be at least 0, got {rounds}")
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
        self.zoneout_h = check_probability(zoneout_h, "MogrifierLSTM", "zoneout_h")
        self.zoneout_c = check_probability(zoneout_c, "MogrifierLSTM", "zoneout_c")
        self._mogrifier_lstm = ops.mogrifier_lstm
        self._mogrifier_lstm_pair = ops.mogrifier_lstm_pair
        self._add_round_parameters(settings, mogrifier_bias, share_rounds)
        self.reset_parameters()

    def _add_round_parameters(
        self, settings: RecurrentSettings, mogrifier_bias: bool, share_rounds: bool
    ) -> None:
        for l, (X, H) in enumerate(self.sizes):
            # Even rounds gate x (X wide) with h and Q, odd rounds gate h (H wide) with x and R.
            for name, n, out, in_ in (
                ("Q", (self.rounds + 1) // 2, X, H),
                ("R", self.rounds // 2, H, X),
            ):
                n = min(n, 1) if share_rounds else n
                if n == 0:
                    continue
                if self.rank is None:
                    self._add(f"{name}_l{l}", (n, out, in_), settings)
                else:
                    self._add(f"{name}_A_l{l}", (n, out, self.rank), settings)
                    self._add(f"{name}_B_l{l}", (n, self.rank, in_), settings)
                if mogrifier_bias:
                    self._add(f"{name}_bias_l{l}", (n, out), settings)

    def reset_parameters(self, forget_bias: float | None = None) -> None:
        """Draws the gate parameters and full-rank round weights as torch.nn.LSTM its weights.

        Low-rank factors are drawn from a normal distribution with standard deviation
        (1 / (fan_in * rank))**(1/4), truncated at two standard deviations, and round biases are 0
        (Melis et al., 2020), so that a round is initially the identity in expectation.
        forget_bias: the bias of the forget gate; by default the constructor's
        """
        super().reset_parameters(forget_bias)
        for l, (_, H) in enumerate(self.sizes):
            for name in ("Q", "R", "Q_A", "Q_B", "R_A", "R_B", "Q_bias", "R_bias"):
                if (parameter := self._parameter(name, l)) is None:
                    continue
                if name.endswith("bias"):
                    nn.init.zeros_(parameter)
                elif self.rank is None:
                    nn.init.uniform_(parameter, -1 / math.sqrt(H), 1 / math.sqrt(H))
                else:
                    second_factor = self._parameter(f"{name[0]}_B", l)
                    assert second_factor is not None, "a low-rank weight has two factors"
                    std = (1 / (second_factor.size(-1) * self.rank)) ** 0.25
                    nn.init.trunc_normal_(parameter, std=std, a=-2 * std, b=2 * std)

    def _round_weight(self, name: str, l: int) -> Tensor | tuple[Tensor, Tensor] | None:
        """Returns Q or R of a layer as the operator takes it: a tensor or a pair of factors."""
        if self.rank is None:
            return self._parameter(name, l)
        A, B = self._parameter(f"{name}_A", l), self._parameter(f"{name}_B", l)
        return None if A is None or B is None else (A, B)

    def _layer_arguments(
        self, l: int, device: torch.device, state: States, lengths: Tensor | None
    ) -> dict[str, Any]:
        """Returns all arguments of `mogrifier_lstm` for a layer except x."""
        randomness = self._randomness(
            device,
            self.input_dropout,
            self.dropout,
            self.state_dropout,
            self.zoneout_h,
            self.zoneout_c,
        )
        h, c = state
        return {
            **self._gates(l),
            "h0": h[l],
            "c0": c[l],
            "Q": self._round_weight("Q", l),
            "R": self._round_weight("R", l),
            "Q_bias": self._parameter("Q_bias", l),
            "R_bias": self._parameter("R_bias", l),
            "rounds": self.rounds,
            "lengths": lengths,
            "cap_input_gate": self.cap_input_gate,
            "input_dropout": self.dropout if l else self.input_dropout,
            "locked_input": self.locked_input,
            "state_dropout": self.state_dropout,
            "zoneout_h": self.zoneout_h,
            "zoneout_c": self.zoneout_c,
            **randomness,
        }

    def _run_layers(
        self, l: int, x: Tensor, state: States, lengths: Tensor | None
    ) -> Sequence[LayerOutput]:
        # Two layers are called together, because CUDA may run them concurrently. A residual layer
        # also reads the output two layers below it, which the pair operator does not take.
        arguments = self._layer_arguments(l, x.device, state, lengths)
        if l + 1 == self.num_layers or self.residual:
            return [self._mogrifier_lstm(x, **arguments)]
        above = self._layer_arguments(l + 1, x.device, state, lengths)
        return self._mogrifier_lstm_pair(x, arguments, above)

    def extra_repr(self) -> str:
        return shown_options(self)
