"""Multi-layer recurrent modules over `lstm` and `mogrifier_lstm`."""

import math

import torch
from torch import nn
from torch.nn.utils import rnn

from fusedseq import fused
from fusedseq.nn.dropout import Dropout, LockedDropout, check_probability, draw_seed


class _Recurrent(nn.Module):
    """Layers, states and lengths; a subclass has `_layers(l, x, h, c, lengths)`, which runs the l-th layer, or more from there on,
    and returns y, (h, c) of each; h and c of all layers."""

    def __init__(
        self, input_size, hidden_size, num_layers, bias, weight_dropout, variational, residual, output, batch_first,
        device, dtype,
    ):  # fmt: skip
        super().__init__()
        name = type(self).__name__
        sizes = [hidden_size] * num_layers if isinstance(hidden_size, int) else list(hidden_size)
        if num_layers < 1 or len(sizes) != num_layers:
            raise ValueError(f"{name}: hidden_size must be an int or one size for each of num_layers = {num_layers} "
                             f"layers (at least 1), got {hidden_size}")  # fmt: skip
        if min(input_size, *sizes) < 1:
            raise ValueError(f"{name}: sizes must be at least 1, got input {input_size}, hidden {hidden_size}")
        if output not in ("last", "sum"):
            raise ValueError(f"{name}: output must be 'last' or 'sum', got {output!r}")
        if residual and len({input_size, *sizes}) > 1:
            raise ValueError(f"{name}: residual needs equal sizes, got input {input_size}, hidden {sizes}")
        if output == "sum" and len(set(sizes)) > 1:
            raise ValueError(f"{name}: output='sum' needs equal hidden sizes, got {sizes}")
        self.input_size, self.hidden_size, self.num_layers = input_size, hidden_size, num_layers
        self.bias, self.residual, self.output, self.batch_first = bias, residual, output, batch_first
        self.sizes = list(zip([input_size, *sizes[:-1]], sizes, strict=True))  # (X, H) of each layer
        self.weight_dropout, self.variational = check_probability(weight_dropout, name, "weight_dropout"), variational
        for l, (X, H) in enumerate(self.sizes):
            self._add(f"weight_ih_l{l}", (4 * H, X), device, dtype)
            self._add(f"weight_hh_l{l}", (4 * H, H), device, dtype)
            if bias:
                self._add(f"bias_ih_l{l}", (4 * H,), device, dtype)
                self._add(f"bias_hh_l{l}", (4 * H,), device, dtype)

    def _add(self, name, shape, device, dtype):
        self.register_parameter(name, nn.Parameter(torch.empty(shape, device=device, dtype=dtype)))

    def _get(self, name, l):
        return getattr(self, f"{name}_l{l}", None)

    def reset_parameters(self, forget_bias=None):
        """As torch.nn.LSTM: U(-1/sqrt(H), 1/sqrt(H)); `forget_bias`, where given, is the forget gate's bias."""
        for l, (_, H) in enumerate(self.sizes):
            for name in ("weight_ih", "weight_hh", "bias_ih", "bias_hh"):
                if self._get(name, l) is not None:
                    nn.init.uniform_(self._get(name, l), -1 / math.sqrt(H), 1 / math.sqrt(H))
            if self.bias and forget_bias is not None:
                nn.init.constant_(self._get("bias_ih", l)[H : 2 * H], forget_bias)
                nn.init.zeros_(self._get("bias_hh", l)[H : 2 * H])

    def _gates(self, l):
        """W_ih, W_hh, and the sum of torch.nn.LSTM's two biases."""
        b = self._get("bias_ih", l) + self._get("bias_hh", l) if self.bias else None
        return self._get("weight_ih", l), self._get("weight_hh", l), b

    def _random(self, device, *probabilities):
        """A layer's arguments of randomness, with a new seed where one of the `probabilities` or the weight drop needs it."""
        seed = draw_seed(device) if self.training and any((*probabilities, self.weight_dropout)) else 0
        return {
            "weight_drop": self.weight_dropout,
            "variational": self.variational,
            "training": self.training,
            "seed": seed,
        }

    def forward(self, x, state=None, lengths=None):
        """Runs all layers.

        x: (T, B, input_size), (B, T, input_size) with `batch_first`, or a PackedSequence
        state: (h, c) to start from, each (num_layers, B, H), or one (B, H_l) tensor a layer where sizes differ; zeros
            by default
        lengths: (B,) int64, in [0, T]: steps past a sequence's length leave its state and give zeros
        returns y, (h, c): y as x but of the last layer's size (the sum of all layers' outputs with output='sum'); the
            final (h, c) in the form of `state`
        """
        if packed := isinstance(x, rnn.PackedSequence):
            if lengths is not None:
                raise ValueError(f"{type(self).__name__}: a PackedSequence has its lengths, got lengths as well")
            sorting = x.unsorted_indices
            x, lengths = rnn.pad_packed_sequence(x)
        elif x.dim() != 3 or x.size(-1) != self.input_size:
            wanted = ("B, T" if self.batch_first else "T, B") + f", {self.input_size}"
            raise ValueError(f"{type(self).__name__}: x must be ({wanted}), got {tuple(x.shape)}")
        elif self.batch_first:
            x = x.transpose(0, 1)
        if lengths is not None:
            lengths = lengths.to(x.device)
        B = x.size(1)
        if state is None:
            zeros = [x.new_zeros(B, H) for _, H in self.sizes]
            state = zeros, zeros
        if len(state) != 2 or any(len(s) != self.num_layers for s in state):
            raise ValueError(f"{type(self).__name__}: state must be (h, c) with an entry for each of "
                             f"{self.num_layers} layers, got {[len(s) for s in state]}")  # fmt: skip
        inputs, total, h, c = [x], None, [], []
        while (l := len(inputs) - 1) < self.num_layers:
            below = inputs[-1] + inputs[-2] if self.residual and l > 0 else inputs[-1]
            for y, (h_l, c_l) in self._layers(l, below, *state, lengths):
                total = y if total is None or self.output == "last" else total + y
                inputs.append(y)
                h.append(h_l)
                c.append(c_l)
        if len({H for _, H in self.sizes}) == 1:
            h, c = torch.stack(h), torch.stack(c)
        if packed:
            total = rnn.pack_padded_sequence(total, lengths.cpu(), enforce_sorted=sorting is None)
        elif self.batch_first:
            total = total.transpose(0, 1)
        return total, (h, c)

    def extra_repr(self):
        return f"{self.input_size}, {self.hidden_size}, num_layers={self.num_layers}"


class LSTM(_Recurrent):
    """A multi-layer LSTM with AWD-LSTM's regularisers (Merity et al., 2018); without them torch.nn.LSTM, whose
    `state_dict` it loads.

    input_size    hidden_size: one for all layers, or a list of one for each    num_layers
    dropout: between layers, drawn once for all steps with `locked` (AWD-LSTM), or at each step
    weight_dropout: DropConnect on W_hh, one mask for all steps; `variational`: one mask value per row
    residual: a layer reads the sum of the two outputs below it
    output: 'last' layer's, or the 'sum' of all layers'    batch_first: x and y are (B, T, .)
    """

    def __init__(
        self, input_size, hidden_size, num_layers=1, bias=True, *, dropout=0.0, locked=True, weight_dropout=0.0,
        variational=False, residual=False, output="last", batch_first=False, forget_bias=None, device=None, dtype=None, ops=fused,
    ):  # fmt: skip
        super().__init__(
            input_size, hidden_size, num_layers, bias, weight_dropout, variational, residual, output, batch_first,
            device, dtype,
        )  # fmt: skip
        self.layer_dropout = (LockedDropout if locked else Dropout)(dropout, ops=ops)
        self._lstm = ops.lstm
        self.reset_parameters(forget_bias)

    def _layers(self, l, x, h, c, lengths):
        if l > 0:
            x = self.layer_dropout(x)
        return [self._lstm(x, *self._gates(l), h[l], c[l], lengths, **self._random(x.device))]


class MogrifierLSTM(_Recurrent):
    """A multi-layer Mogrifier LSTM (Melis et al., 2020).

    input_size    hidden_size: one for all layers, or a list of one for each    num_layers
    rounds: of mutual gating; 0 is an LSTM    rank: of each round's weight, in two factors; None is full rank
    mogrifier_bias: a bias for each round    share_rounds: one Q and one R for all rounds
    cap_input_gate: i = min(i, 1 - f)
    input_dropout: on the first layer's input    dropout: on the inputs of the others; both drawn once for all steps
        with `locked` (AWD-LSTM), or at each step (the paper)
    state_dropout: on the recurrent h, one mask a sequence    zoneout_h, zoneout_c: probability of keeping the old state
    weight_dropout, variational, residual, output, batch_first: as in `LSTM`
    """

    def __init__(
        self, input_size, hidden_size, num_layers=1, bias=True, *, rounds=5, rank=None, mogrifier_bias=True,
        share_rounds=False, cap_input_gate=False, input_dropout=0.0, dropout=0.0, locked=True, state_dropout=0.0,
        zoneout_h=0.0, zoneout_c=0.0, weight_dropout=0.0, variational=False, residual=False, output="last",
        batch_first=False, forget_bias=None, device=None, dtype=None, ops=fused,
    ):  # fmt: skip
        super().__init__(
            input_size, hidden_size, num_layers, bias, weight_dropout, variational, residual, output, batch_first,
            device, dtype,
        )  # fmt: skip
        if rounds < 0:
            raise ValueError(f"MogrifierLSTM: rounds must be at least 0, got {rounds}")
        if rank is not None and rank < 1:
            raise ValueError(f"MogrifierLSTM: rank must be at least 1, or None for full rank, got {rank}")
        self.rounds, self.rank, self.locked, self.cap_input_gate = rounds, rank, locked, cap_input_gate
        self.input_dropout = check_probability(input_dropout, "MogrifierLSTM", "input_dropout")
        self.dropout = check_probability(dropout, "MogrifierLSTM", "dropout")
        self.state_dropout = check_probability(state_dropout, "MogrifierLSTM", "state_dropout")
        self.zoneout_h = check_probability(zoneout_h, "MogrifierLSTM", "zoneout_h")
        self.zoneout_c = check_probability(zoneout_c, "MogrifierLSTM", "zoneout_c")
        self._mogrifier_lstm, self._mogrifier_lstm_pair = ops.mogrifier_lstm, ops.mogrifier_lstm_pair
        for l, (X, H) in enumerate(self.sizes):
            for name, n, rows, columns in (("Q", (rounds + 1) // 2, X, H), ("R", rounds // 2, H, X)):
                n = min(n, 1) if share_rounds else n
                if n == 0:
                    continue
                if rank is None:
                    self._add(f"{name}_l{l}", (n, rows, columns), device, dtype)
                else:
                    self._add(f"{name}_A_l{l}", (n, rows, rank), device, dtype)
                    self._add(f"{name}_B_l{l}", (n, rank, columns), device, dtype)
                if mogrifier_bias:
                    self._add(f"{name}_bias_l{l}", (n, rows), device, dtype)
        self.reset_parameters(forget_bias)

    def reset_parameters(self, forget_bias=None):
        """The gates as torch.nn.LSTM's, full-rank rounds like them; low-rank factors truncated normal with std
        (1 / (fan_in * rank))**(1/4) and round biases 0 (Melis et al., 2020): a round starts as the identity in
        expectation."""
        super().reset_parameters(forget_bias)
        for l, (_, H) in enumerate(self.sizes):
            for name in ("Q", "R", "Q_A", "Q_B", "R_A", "R_B", "Q_bias", "R_bias"):
                if (p := self._get(name, l)) is None:
                    continue
                if name.endswith("bias"):
                    nn.init.zeros_(p)
                elif self.rank is None:
                    nn.init.uniform_(p, -1 / math.sqrt(H), 1 / math.sqrt(H))
                else:
                    fan_in = self._get(f"{name[0]}_B", l).size(-1)
                    std = (1 / (fan_in * self.rank)) ** 0.25
                    nn.init.trunc_normal_(p, std=std, a=-2 * std, b=2 * std)

    def _round_weight(self, name, l):
        if self.rank is None:
            return self._get(name, l)
        A = self._get(f"{name}_A", l)
        return None if A is None else (A, self._get(f"{name}_B", l))

    def _arguments(self, l, device, h, c, lengths):
        """A layer's, but for x."""
        random = self._random(
            device, self.input_dropout, self.dropout, self.state_dropout, self.zoneout_h, self.zoneout_c
        )
        W_ih, W_hh, b = self._gates(l)
        return {
            "W_ih": W_ih, "W_hh": W_hh, "b": b, "h0": h[l], "c0": c[l], "Q": self._round_weight("Q", l),
            "R": self._round_weight("R", l), "Q_bias": self._get("Q_bias", l), "R_bias": self._get("R_bias", l),
            "rounds": self.rounds, "lengths": lengths, "cap_input_gate": self.cap_input_gate,
            "input_dropout": self.dropout if l else self.input_dropout, "locked_input": self.locked,
            "state_dropout": self.state_dropout, "zoneout_h": self.zoneout_h, "zoneout_c": self.zoneout_c, **random,
        }  # fmt: skip

    def _layers(self, l, x, h, c, lengths):
        """Two at a time, which on CUDA may run at once; a residual layer reads more than the one below it."""
        first = self._arguments(l, x.device, h, c, lengths)
        if l + 1 == self.num_layers or self.residual:
            return [self._mogrifier_lstm(x, **first)]
        return self._mogrifier_lstm_pair(x, first, self._arguments(l + 1, x.device, h, c, lengths))

    def extra_repr(self):
        return f"{super().extra_repr()}, rounds={self.rounds}, rank={self.rank}"
