"""What `LSTM` and `MogrifierLSTM` share: layers, gate parameters, states and lengths."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.utils import rnn

from fusedseq.fused import check
from fusedseq.nn.dropout import check_probability, draw_seed
from fusedseq.nn.operators import LayerOutput

States = tuple[Sequence[Tensor] | Tensor, Sequence[Tensor] | Tensor]  # (h, c) of all layers


@dataclass(frozen=True)
class RecurrentSettings:
    """The arguments that `LSTM` and `MogrifierLSTM` have in common; see `LSTM`."""

    input_size: int
    hidden_size: int | Sequence[int]  # one size for all layers, or one for each
    num_layers: int
    bias: bool
    weight_drop: float  # on W_hh, in [0, 1]
    variational: bool  # of weight_drop: one mask value per row of W_hh
    residual: bool  # layer l > 0 reads the sum of the outputs of the layers l-1 and l-2
    output: Literal["last", "sum"]  # of which layers
    batch_first: bool
    device: torch.device | str | None
    dtype: torch.dtype | None

    def hidden_sizes(self, module: str) -> list[int]:
        """Returns H of each layer; raises ValueError, naming the module, for invalid settings."""
        hidden, L = self.hidden_size, self.num_layers
        sizes = [hidden] * L if isinstance(hidden, int) else list(hidden)
        if L < 1 or len(sizes) != L:
            raise ValueError(
                f"{module}: hidden_size must be an int or one size for each of num_layers = {L} "
                f"layers (at least 1), got {hidden}"
            )
        if min(self.input_size, *sizes) < 1:
            raise ValueError(
                f"{module}: input_size and hidden_size must be at least 1, got {self.input_size} "
                f"and {hidden}"
            )
        if self.output not in ("last", "sum"):
            raise ValueError(f"{module}: output must be 'last' or 'sum', got {self.output!r}")
        if self.residual and len({self.input_size, *sizes}) > 1:
            raise ValueError(
                f"{module}: residual must be False unless input_size and all hidden sizes are "
                f"equal, got {self.input_size} and {sizes}"
            )
        if self.output == "sum" and len(set(sizes)) > 1:
            raise ValueError(
                f"{module}: output must be 'last' unless all hidden sizes are equal, got {sizes}"
            )
        check_probability(self.weight_drop, module, "weight_drop")
        return sizes


class Recurrent(nn.Module):
    """The base class of `LSTM` and `MogrifierLSTM`; a subclass implements `_run_layers`."""

    forget_bias: float | None

    def __init__(self, settings: RecurrentSettings) -> None:
        super().__init__()
        s = settings
        hidden = s.hidden_sizes(type(self).__name__)
        self.input_size, self.hidden_size, self.num_layers = (
            s.input_size,
            s.hidden_size,
            s.num_layers,
        )
        self.bias, self.batch_first = s.bias, s.batch_first
        self.residual, self.output = s.residual, s.output
        self.weight_drop, self.variational = s.weight_drop, s.variational
        # (X, H) of each layer
        self.sizes = list(zip([s.input_size, *hidden[:-1]], hidden, strict=True))
        for l, (X, H) in enumerate(self.sizes):
            self._add(f"weight_ih_l{l}", (4 * H, X), s)
            self._add(f"weight_hh_l{l}", (4 * H, H), s)
            if s.bias:
                self._add(f"bias_ih_l{l}", (4 * H,), s)
                self._add(f"bias_hh_l{l}", (4 * H,), s)

    def _add(self, name: str, shape: tuple[int, ...], s: RecurrentSettings) -> None:
        values = torch.empty(shape, device=s.device, dtype=s.dtype)
        self.register_parameter(name, nn.Parameter(values))

    def _parameter(self, name: str, l: int) -> nn.Parameter | None:
        """Returns a parameter of layer l, or None if the module does not have it."""
        parameter: nn.Parameter | None = getattr(self, f"{name}_l{l}", None)
        return parameter

    def reset_parameters(self, forget_bias: float | None = None) -> None:
        """Draws the parameters from U(-1/sqrt(H), 1/sqrt(H)), as torch.nn.LSTM.

        forget_bias: the bias of the forget gate; by default the constructor's
        Errors: ValueError for a forget_bias of parameters that are sharded among processes.
        """
        forget_bias = self.forget_bias if forget_bias is None else forget_bias
        if forget_bias is not None and any(hasattr(p, "full_tensor") for p in self.parameters()):
            # A slice of a DTensor may be a copy, which would take the forget bias and be lost.
            raise ValueError(
                f"{type(self).__name__}: reset_parameters with forget_bias must come before the "
                "parameters are sharded, got DTensors: load a full state dict into them"
            )
        for l, (_, H) in enumerate(self.sizes):
            for name in ("weight_ih", "weight_hh", "bias_ih", "bias_hh"):
                if (parameter := self._parameter(name, l)) is not None:
                    nn.init.uniform_(parameter, -1 / math.sqrt(H), 1 / math.sqrt(H))
            bias_ih, bias_hh = self._parameter("bias_ih", l), self._parameter("bias_hh", l)
            if bias_ih is not None and bias_hh is not None and forget_bias is not None:
                nn.init.constant_(bias_ih[H : 2 * H], forget_bias)
                nn.init.zeros_(bias_hh[H : 2 * H])

    def _gates(self, l: int) -> dict[str, Tensor | None]:
        """Returns the operator's arguments W_ih, W_hh and b, the sum of torch.nn.LSTM's biases."""
        bias_ih, bias_hh = self._parameter("bias_ih", l), self._parameter("bias_hh", l)
        return {
            "W_ih": self._parameter("weight_ih", l),
            "W_hh": self._parameter("weight_hh", l),
            "b": None if bias_ih is None or bias_hh is None else bias_ih + bias_hh,
        }

    def _randomness(self, device: torch.device, *probabilities: float) -> dict[str, Any]:
        """Returns a layer's arguments of weight drop and randomness.

        A new seed is drawn if one of the `probabilities` or the weight drop needs it.
        """
        random = self.training and any((*probabilities, self.weight_drop))
        return {
            "weight_drop": self.weight_drop,
            "variational": self.variational,
            "training": self.training,
            "seed": draw_seed(device) if random else 0,
        }

    def _run_layers(
        self, l: int, x: Tensor, state: States, lengths: Tensor | None
    ) -> Sequence[LayerOutput]:
        """Runs layer l, or layer l and more above it, and returns the output of each.

        x: (T, B, X)    state: (h, c), the initial states of all layers    lengths: (B,) or None
        """
        raise NotImplementedError

    def forward(
        self,
        x: Tensor | rnn.PackedSequence,
        state: States | None = None,
        lengths: Tensor | Sequence[int] | None = None,
        *,
        hx: States | None = None,
    ) -> tuple[Tensor | rnn.PackedSequence, States]:
        """Runs all layers.

        x: (T, B, input_size), (B, T, input_size) with `batch_first`, (T, input_size) for one
            sequence without a batch dimension, or a PackedSequence
        state: the initial (h, c), each (num_layers, B, H), or a list with a tensor (B, H_l) for
            each layer if the sizes differ; zeros by default. For an x without a batch dimension,
            they have none either: (num_layers, H), or (H_l,) for each layer
        lengths: (B,) int64 or int32, or a list, in [0, T]: steps after a sequence's length leave
            its state unchanged and output zeros
        hx: another name of `state`, which torch.nn.LSTM has
        returns y, (h, c): y as x but of the last layer's size (the sum of all layers' outputs with
            output='sum'); the final (h, c) in the form of `state`
        Errors: ValueError for another shape of x, a state without an entry for each layer, both
        state and hx, or lengths together with a PackedSequence or an x without a batch dimension.
        """
        module = type(self).__name__
        if hx is not None:
            if state is not None:
                raise ValueError(
                    f"{module}: state must be None where hx is given, which is the same argument, "
                    "got both"
                )
            state = hx
        if isinstance(x, rnn.PackedSequence):
            if lengths is not None:
                raise ValueError(
                    f"{module}: lengths must be None with a PackedSequence, which has its own, got "
                    "lengths"
                )
            steps, lengths = rnn.pad_packed_sequence(x)
            y, final = self._run(steps, state, lengths)
            # A sequence without this permutation was packed from lengths in descending order.
            in_order = x.unsorted_indices is None
            return rnn.pack_padded_sequence(y, lengths.cpu(), enforce_sorted=in_order), final
        if x.dim() not in (2, 3) or x.size(-1) != self.input_size:
            required = ("B, T" if self.batch_first else "T, B") + f", {self.input_size}"
            raise ValueError(
                f"{module}: x must be ({required}), or (T, {self.input_size}) without a batch "
                f"dimension, got {tuple(x.shape)}"
            )
        if x.dim() == 2:
            return self._run_unbatched(x, state, lengths)
        y, final = self._run(x.transpose(0, 1) if self.batch_first else x, state, lengths)
        return y.transpose(0, 1) if self.batch_first else y, final

    def _run_unbatched(
        self, x: Tensor, state: States | None, lengths: Tensor | Sequence[int] | None
    ) -> tuple[Tensor, States]:
        """Computes `forward` for x (T, input_size) and states without a batch dimension."""
        module = type(self).__name__
        if lengths is not None:
            raise ValueError(
                f"{module}: lengths must be None for an x without a batch dimension, got lengths"
            )
        if state is not None:
            self._check_state(state)
            if any(s_l.dim() != 1 for s in state for s_l in s):
                shapes = [[tuple(s_l.shape) for s_l in s] for s in state]
                raise ValueError(
                    f"{module}: state must be (h, c), each (num_layers, H), for an x without a "
                    f"batch dimension, got entries of the shapes {shapes}"
                )
            h, c = state
            state = [t[None] for t in h], [t[None] for t in c]
        y, (h, c) = self._run(x[:, None], state, None)
        if isinstance(h, Tensor) and isinstance(c, Tensor):
            return y[:, 0], (h[:, 0], c[:, 0])
        return y[:, 0], ([t[0] for t in h], [t[0] for t in c])

    def _check_state(self, state: States) -> None:
        if len(state) != 2 or any(len(s) != self.num_layers for s in state):
            raise ValueError(
                f"{type(self).__name__}: state must be (h, c) with an entry for each of "
                f"{self.num_layers} layers, got {[len(s) for s in state]}"
            )

    def _run(
        self, x: Tensor, state: States | None, lengths: Tensor | Sequence[int] | None
    ) -> tuple[Tensor, States]:
        """Computes `forward` for x (T, B, input_size)."""
        ends = check.to_lengths(lengths, x.device)
        if state is None:
            zeros = [x.new_zeros(x.size(1), H) for _, H in self.sizes]
            state = zeros, zeros
        self._check_state(state)
        layer_inputs, total = [x], None
        h: list[Tensor] = []
        c: list[Tensor] = []
        while (l := len(layer_inputs) - 1) < self.num_layers:
            below = layer_inputs[-1]
            if self.residual and l > 0:
                below = below + layer_inputs[-2]
            for y, (h_l, c_l) in self._run_layers(l, below, state, ends):
                total = y if total is None or self.output == "last" else total + y
                layer_inputs.append(y)
                h.append(h_l)
                c.append(c_l)
        assert total is not None, "there is at least one layer"
        if len({H for _, H in self.sizes}) == 1:
            return total, (torch.stack(h), torch.stack(c))
        return total, (h, c)
