"""What the recurrent modules share: layers, directions, gate parameters, states and lengths."""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import rnn

from fusedseq.fused import check
from fusedseq.nn.dropout import draw_seed
from fusedseq.nn.recurrent_settings import Order, RecurrentSettings

OfLayers = Sequence[Tensor] | Tensor  # of all layers: (num_layers * directions, B, H), or a list
LayerState = tuple[Tensor, ...]  # (h, c), or (h,), of one direction of a layer, (B, H) each
Output = tuple[Tensor, Sequence[LayerState]]  # y of a layer, and the final state of each direction


class Recurrent(nn.Module):
    """The base class of the recurrent modules; a subclass implements `_run_direction`."""

    GATES = 4  # rows of the weights for each hidden unit
    STATE: tuple[str, ...] = ("h", "c")  # the names of the tensors of a state
    forget_bias: float | None = None
    # Of modules that older versions have pickled.
    bidirectional, proj_size, zoneout_h, zoneout_c = False, 0, 0.0, 0.0

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
        self.zoneout_h, self.zoneout_c = s.zoneout_h, s.zoneout_c
        self.weight_drop, self.variational = s.weight_drop, s.variational
        self.bidirectional, self.proj_size = s.bidirectional, s.proj_size
        # (X, H) of each layer
        below = [s.input_size, *[s.directions * self._output_size(H) for H in hidden[:-1]]]
        self.sizes = list(zip(below, hidden, strict=True))
        G = self.GATES
        for l, (X, H) in enumerate(self.sizes):
            for reverse in self._directions():
                self._add("weight_ih", l, (G * H, X), s, reverse)
                self._add("weight_hh", l, (G * H, self._output_size(H)), s, reverse)
                if s.bias:
                    self._add("bias_ih", l, (G * H,), s, reverse)
                    self._add("bias_hh", l, (G * H,), s, reverse)
                if s.proj_size:
                    self._add("weight_hr", l, (s.proj_size, H), s, reverse)

    def _output_size(self, H: int) -> int:
        """Returns the width of h."""
        return self.proj_size or H

    def _directions(self) -> tuple[bool, ...]:
        """Returns for each direction of a layer whether it is the reverse one."""
        return (False, True) if self.bidirectional else (False,)

    def _add(
        self, name: str, l: int, shape: tuple[int, ...], s: RecurrentSettings, reverse: bool
    ) -> None:
        values = torch.empty(shape, device=s.device, dtype=s.dtype)
        self.register_parameter(parameter_name(name, l, reverse), nn.Parameter(values))

    def _parameter(self, name: str, l: int, reverse: bool) -> nn.Parameter | None:
        """Returns a parameter of layer l, or None if the module does not have it."""
        full_name = parameter_name(name, l, reverse)
        if full_name in self._parameters:
            return self._parameters[full_name]
        # torch.nn.utils.parametrize, weight_norm and prune replace a parameter by an attribute.
        parameter: nn.Parameter | None = getattr(self, full_name, None)
        return parameter

    def reset_parameters(self, forget_bias: float | None = None) -> None:
        """Draws the parameters from U(-1/sqrt(H), 1/sqrt(H)), as torch.nn.LSTM.

        forget_bias: the bias of the forget gate; by default the constructor's
        Errors: ValueError for a forget_bias of a cell without a forget gate, and of parameters that
        are sharded among processes.
        """
        forget_bias = self.forget_bias if forget_bias is None else forget_bias
        if forget_bias is not None and "c" not in self.STATE:
            raise ValueError(
                f"{type(self).__name__}: forget_bias must be None, since the cell has no forget "
                f"gate, got {forget_bias}"
            )
        if forget_bias is not None and any(hasattr(p, "full_tensor") for p in self.parameters()):
            # A slice of a DTensor may be a copy, which would take the forget bias and be lost.
            raise ValueError(
                f"{type(self).__name__}: reset_parameters with forget_bias must come before the "
                "parameters are sharded, got DTensors: load a full state dict into them"
            )
        for l, (_, H) in enumerate(self.sizes):
            for reverse in self._directions():
                for name in ("weight_ih", "weight_hh", "bias_ih", "bias_hh", "weight_hr"):
                    if (parameter := self._parameter(name, l, reverse)) is not None:
                        nn.init.uniform_(parameter, -1 / math.sqrt(H), 1 / math.sqrt(H))
                bias_ih = self._parameter("bias_ih", l, reverse)
                bias_hh = self._parameter("bias_hh", l, reverse)
                if bias_ih is not None and bias_hh is not None and forget_bias is not None:
                    nn.init.constant_(bias_ih[H : 2 * H], forget_bias)
                    nn.init.zeros_(bias_hh[H : 2 * H])

    def _gates(self, l: int, reverse: bool) -> dict[str, Tensor | None]:
        """Returns the operator's arguments W_ih, W_hh and b."""
        bias_ih = self._parameter("bias_ih", l, reverse)
        bias_hh = self._parameter("bias_hh", l, reverse)
        return {
            "W_ih": self._parameter("weight_ih", l, reverse),
            "W_hh": self._parameter("weight_hh", l, reverse),
            "b": None if bias_ih is None or bias_hh is None else self._bias(bias_ih, bias_hh),
        }

    def _bias(self, bias_ih: Tensor, bias_hh: Tensor) -> Tensor:
        """Returns the operator's b from the two biases of torch's modules."""
        return bias_ih + bias_hh

    def _randomness(self, device: torch.device, *probabilities: float) -> dict[str, Any]:
        """Returns a layer's arguments of zoneout, weight drop and randomness.

        A new seed is drawn if one of these or of the `probabilities` needs it.
        """
        random = self.training and any(
            (*probabilities, self.zoneout_h, self.zoneout_c, self.weight_drop)
        )
        arguments = {
            "zoneout_h": self.zoneout_h,
            "weight_drop": self.weight_drop,
            "variational": self.variational,
            "training": self.training,
            "seed": draw_seed(device) if random else 0,
        }
        if "c" in self.STATE:
            arguments["zoneout_c"] = self.zoneout_c
        return arguments

    def _layer_input(self, l: int, x: Tensor) -> Tensor:
        """Returns what both directions of layer l read of the output x below it."""
        return x

    def _run_direction(
        self, l: int, reverse: bool, x: Tensor, state: LayerState, order: Order
    ) -> tuple[Tensor, LayerState]:
        """Runs one direction of layer l, and returns y and the final state.

        x: (T, B, X)    state: the initial one
        """
        raise NotImplementedError

    def _run_layers(
        self, l: int, x: Tensor, states: Sequence[LayerState], order: Order
    ) -> Sequence[Output]:
        """Runs layer l, or layer l and more above it, and returns the output of each.

        x: (T, B, X)    states: the initial ones of all layers and directions
        """
        x, first = self._layer_input(l, x), l * len(self._directions())
        outputs = [
            self._run_direction(l, reverse, x, states[first + reverse], order)
            for reverse in self._directions()
        ]
        y = outputs[0][0] if len(outputs) == 1 else torch.cat([y for y, _ in outputs], -1)
        return [(y, [final for _, final in outputs])]

    def forward(
        self,
        x: Tensor | rnn.PackedSequence,
        state: Any = None,
        lengths: Tensor | Sequence[int] | None = None,
        *,
        hx: Any = None,
        starts: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        max_seqlen: int | None = None,
    ) -> tuple[Tensor | rnn.PackedSequence, Any]:
        """Runs all layers.

        x: (T, B, input_size), (B, T, input_size) with `batch_first`, (T, input_size) for one
            sequence without a batch dimension, a PackedSequence, a nested tensor (B, ragged,
            input_size) in the layout torch.jagged, or (tokens, input_size) with cu_seqlens
        state: the initial (h, c), or h of a module without c: each (num_layers, B, H), or a list
            with a tensor (B, H_l) for each layer if the sizes differ; zeros by default. With
            `bidirectional` there is an entry for each direction of each layer, the forward one
            first. For an x without a batch dimension, they have none either: (num_layers, H), or
            (H_l,) for each layer
        lengths: (B,) int64 or int32, or a list, in [0, T]: steps after a sequence's length leave
            its state unchanged and output zeros
        hx: another name of `state`, which torch's modules have
        starts: (T, B) bool, (B, T) with `batch_first`: where true, a new sequence starts in the
            row, and the state before that step is zero; in the reverse direction, before the last
            step of the sequence that ends there
        cu_seqlens: (sequences + 1,) int64 or int32, from 0 to the number of tokens, at least 1:
            where in x each sequence begins, and where the last one ends. The sequences are padded
            to max_seqlen for the time of the call
        max_seqlen: at least the length of the longest sequence of cu_seqlens; by default it is read
            back from the device, which compiled code and the capture of a CUDA graph cannot do
        returns y and the final state: y as x but of the last layer's width (the sum of all layers'
            outputs with output='sum'), which is twice H with `bidirectional`, the forward direction
            first; the final state in the form of `state`
        Errors: ValueError for another shape of x, a state without an entry for each layer, both
        state and hx, lengths or starts together with an x that has its own sequences, lengths
        together with an x without a batch dimension, and max_seqlen without cu_seqlens or below the
        longest sequence. TypeError for a max_seqlen that is no whole number.
        """
        module = type(self).__name__
        if hx is not None:
            if state is not None:
                raise ValueError(
                    f"{module}: state must be None where hx is given, which is the same argument, "
                    "got both"
                )
            state = hx
        self._check_sequences(x, lengths, starts, cu_seqlens)
        if max_seqlen is not None and cu_seqlens is None:
            raise ValueError(
                f"{module}: max_seqlen must be None without cu_seqlens, got {max_seqlen}"
            )
        if isinstance(x, rnn.PackedSequence):
            steps, own_lengths = rnn.pad_packed_sequence(x)
            order = Order(check.to_lengths(own_lengths, steps.device), None)
            y, final = self._run(steps, state, order)
            # A sequence without this permutation was packed from lengths in descending order.
            in_order = x.unsorted_indices is None
            return rnn.pack_padded_sequence(y, own_lengths, enforce_sorted=in_order), final
        if x.is_nested:
            return self._run_nested(x, state)
        if cu_seqlens is not None:
            return self._run_ragged(x, state, cu_seqlens, max_seqlen)
        if x.dim() not in (2, 3) or x.size(-1) != self.input_size:
            required = ("B, T" if self.batch_first else "T, B") + f", {self.input_size}"
            raise ValueError(
                f"{module}: x must be ({required}), or (T, {self.input_size}) without a batch "
                f"dimension, got {tuple(x.shape)}"
            )
        if x.dim() == 2:
            return self._run_unbatched(x, state, lengths, starts)
        if self.batch_first:
            x = x.transpose(0, 1)
            starts = starts if starts is None else starts.transpose(0, 1)
        y, final = self._run(x, state, Order(check.to_lengths(lengths, x.device), starts))
        return y.transpose(0, 1) if self.batch_first else y, final

    def _check_sequences(self, x: Any, lengths: Any, starts: Any, cu_seqlens: Any) -> None:
        """Requires that only one argument says which sequences there are."""
        if lengths is None and starts is None and cu_seqlens is None:
            return
        own = {
            "a PackedSequence": isinstance(x, rnn.PackedSequence),
            "a nested tensor": isinstance(x, Tensor) and x.is_nested,
            "cu_seqlens": cu_seqlens is not None,
        }
        given = {"lengths": lengths, "starts": starts, "cu_seqlens": cu_seqlens}
        for kind, is_used in own.items():
            for name, value in given.items():
                if is_used and value is not None and name != kind:
                    raise ValueError(
                        f"{type(self).__name__}: {name} must be None with {kind}, which has its "
                        f"own sequences, got {name}"
                    )

    def _run_ragged(
        self, x: Tensor, state: Any, cu_seqlens: Tensor, max_seqlen: int | None
    ) -> tuple[Tensor, Any]:
        """Computes `forward` for x (tokens, input_size), whose sequences follow each other."""
        module = type(self).__name__
        if x.dim() != 2 or x.size(-1) != self.input_size:
            raise ValueError(
                f"{module}: x must be (tokens, {self.input_size}) with cu_seqlens, got "
                f"{tuple(x.shape)}"
            )
        offsets = check.offsets(module, "cu_seqlens", cu_seqlens, x, "x")
        lengths, B = offsets.diff(), len(offsets) - 1
        if len(x) == 0 or B == 0:
            raise ValueError(f"{module}: x must have at least one token, got {tuple(x.shape)}")
        T = check.longest(module, "max_seqlen", max_seqlen, offsets)
        # The place (step, sequence) of each token in (T, B).
        sequence = torch.arange(B, device=x.device).repeat_interleave(lengths, output_size=len(x))
        step = torch.arange(len(x), device=x.device) - offsets[sequence]
        padded = x.new_zeros(T, B, x.size(1)).index_put((step, sequence), x)
        y, final = self._run(padded, state, Order(lengths, None))
        return y[step, sequence], final

    def _run_nested(self, x: Tensor, state: Any) -> tuple[Tensor, Any]:
        """Computes `forward` for a nested tensor (B, ragged, input_size)."""
        if x.layout != torch.jagged or x.dim() != 3 or x.size(-1) != self.input_size:
            raise ValueError(
                f"{type(self).__name__}: a nested x must be (B, ragged, {self.input_size}) in the "
                f"layout torch.jagged, got {x.dim()} dimensions in the layout {x.layout}"
            )
        if x.lengths() is not None:  # type: ignore[attr-defined]  # only nested tensors have it
            x = x.contiguous()  # without holes between the sequences
        offsets: Tensor = x.offsets()  # type: ignore[attr-defined]
        longest: int | None = x._maybe_max_seqlen  # type: ignore[attr-defined]  # None: not known
        y, final = self._run_ragged(x.values(), state, offsets, longest)
        return torch.nested.nested_tensor_from_jagged(y, offsets), final

    def _run_unbatched(
        self, x: Tensor, state: Any, lengths: Tensor | Sequence[int] | None, starts: Tensor | None
    ) -> tuple[Tensor, Any]:
        """Computes `forward` for x (T, input_size) and states without a batch dimension."""
        module = type(self).__name__
        if lengths is not None:
            raise ValueError(
                f"{module}: lengths must be None for an x without a batch dimension, got lengths"
            )
        if state is not None:
            parts = self._parts(state)
            if any(s_l.dim() != 1 for s in parts for s_l in s):
                shapes = [[tuple(s_l.shape) for s_l in s] for s in parts]
                raise ValueError(
                    f"{module}: state must be {self._state_name()}, each (num_layers, H), for an x "
                    f"without a batch dimension, got entries of the shapes {shapes}"
                )
            state = self._state([[t[None] for t in s] for s in parts])
        starts = None if starts is None else starts[:, None]
        y, final = self._run(x[:, None], state, Order(None, starts))
        parts = [
            s[:, 0] if isinstance(s, Tensor) else [t[0] for t in s] for s in self._parts(final)
        ]
        return y[:, 0], self._state(parts)

    def _state_name(self) -> str:
        return f"({', '.join(self.STATE)})" if len(self.STATE) > 1 else self.STATE[0]

    def _parts(self, state: Any) -> Sequence[OfLayers]:
        """Returns the tensors of a state of all layers, in the order of STATE."""
        parts = state if len(self.STATE) > 1 else (state,)
        count = self.num_layers * len(self._directions())
        if len(parts) != len(self.STATE) or any(len(s) != count for s in parts):
            directions = " in 2 directions" if self.bidirectional else ""
            raise ValueError(
                f"{type(self).__name__}: state must be {self._state_name()} with an entry for each "
                f"of {self.num_layers} layers{directions}, got {[len(s) for s in parts]}"
            )
        return parts

    def _state(self, parts: Sequence[Any]) -> Any:
        """Returns a state in the form in which the module takes and returns it."""
        return tuple(parts) if len(self.STATE) > 1 else parts[0]

    def _run(self, x: Tensor, state: Any, order: Order) -> tuple[Tensor, Any]:
        """Computes `forward` for x (T, B, input_size)."""
        if state is None:
            widths = {
                "h": [self._output_size(H) for _, H in self.sizes for _ in self._directions()],
                "c": [H for _, H in self.sizes for _ in self._directions()],
            }
            state = self._state([zeros_of(x, widths[name]) for name in self.STATE])
        initial = list(zip(*self._parts(state), strict=True))
        layer_inputs, total = [x], None
        final: list[LayerState] = []
        while (l := len(layer_inputs) - 1) < self.num_layers:
            below = layer_inputs[-1]
            if self.residual and l > 0:
                below = below + layer_inputs[-2]
            for y, states in self._run_layers(l, below, initial, order):
                total = y if total is None or self.output == "last" else total + y
                layer_inputs.append(y)
                final += states
        assert total is not None, "there is at least one layer"
        parts = [list(part) for part in zip(*final, strict=True)]
        if len({H for _, H in self.sizes}) == 1:
            return total, self._state([torch.stack(part) for part in parts])
        return total, self._state(parts)


def zeros_of(x: Tensor, widths: Sequence[int]) -> list[Tensor]:
    """Returns (B, width) zeros for every width; entries of one width are one tensor, since no
    operator changes its initial state.    x: (T, B, X)
    """
    zeros = {width: x.new_zeros(x.size(1), width) for width in {*widths}}
    return [zeros[width] for width in widths]


def parameter_name(name: str, l: int, reverse: bool) -> str:
    """Returns the name of a parameter of layer l, as torch's modules have it."""
    return f"{name}_l{l}_reverse" if reverse else f"{name}_l{l}"
