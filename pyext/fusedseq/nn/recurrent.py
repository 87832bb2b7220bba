"""What the recurrent modules share: layers, directions, states and the layouts of sequences."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils import rnn

from fusedseq.fused import check
from fusedseq.fused.nested import nested_as
from fusedseq.nn.dropout import draw_seed
from fusedseq.nn.recurrent_input import check_sequences, check_starts, check_x
from fusedseq.nn.recurrent_parameters import RecurrentParameters
from fusedseq.nn.recurrent_settings import Order
from fusedseq.nn.recurrent_state import LayerState, OfLayers, StateForm, zeros_of

Output = tuple[Tensor, Sequence[LayerState]]  # y of a layer, and the final state of each direction


class Recurrent(RecurrentParameters):
    """The base class of the recurrent modules; a subclass implements `_run_direction`."""

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
            its state unchanged and output zeros. Of a list, compiled code is compiled anew
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
        Errors: ValueError for another shape or layout of x or starts, a state of another form, both
        state and hx, lengths or starts together with an x that has its own sequences, lengths
        together with an x without a batch dimension, and max_seqlen without cu_seqlens or below the
        longest sequence. TypeError for an x or starts that is no tensor, and a max_seqlen that is
        no whole number.
        """
        module = type(self).__name__
        if hx is not None:
            if state is not None:
                raise ValueError(
                    f"{module}: state must be None where hx is given, which is the same argument, "
                    "got both"
                )
            state = hx
        check_sequences(module, x, lengths, starts, cu_seqlens)
        if max_seqlen is not None and cu_seqlens is None:
            raise ValueError(
                f"{module}: max_seqlen must be None without cu_seqlens, got {max_seqlen}"
            )
        check_x(module, x, self.input_size, self.batch_first, cu_seqlens is not None)
        if isinstance(x, rnn.PackedSequence):
            return self._run_packed(x, state)
        if x.is_nested:
            return self._run_nested(x, state)
        if cu_seqlens is not None:
            return self._run_ragged(x, state, cu_seqlens, max_seqlen)
        check_starts(module, starts, x, self.batch_first)
        if x.dim() == 2:
            return self._run_unbatched(x, state, lengths, starts)
        if self.batch_first:
            x = x.transpose(0, 1)
            starts = starts if starts is None else starts.transpose(0, 1)
        y, final = self._run(x, state, Order(check.to_lengths(lengths, x.device), starts))
        return y.transpose(0, 1) if self.batch_first else y, final

    def _run_packed(self, x: rnn.PackedSequence, state: Any) -> tuple[rnn.PackedSequence, Any]:
        """Computes `forward` for a PackedSequence, and returns y in its order."""
        steps, lengths = rnn.pad_packed_sequence(x)  # in the order before they were sorted
        y, final = self._run(steps, state, Order(check.to_lengths(lengths, steps.device), None))
        if x.sorted_indices is not None:
            y, lengths = y.index_select(1, x.sorted_indices), lengths[x.sorted_indices.cpu()]
        rows = rnn.pack_padded_sequence(y, lengths).data
        packed = rnn.PackedSequence(rows, x.batch_sizes, x.sorted_indices, x.unsorted_indices)
        return packed, final

    def _run_ragged(
        self, x: Tensor, state: Any, cu_seqlens: Tensor, max_seqlen: int | None
    ) -> tuple[Tensor, Any]:
        """Computes `forward` for x (tokens, input_size), whose sequences follow each other."""
        module = type(self).__name__
        offsets = check.offsets(module, "cu_seqlens", cu_seqlens, x, "x")
        # Not len(), whose result is a constant of an exported program.
        lengths, B, tokens = offsets.diff(), offsets.size(0) - 1, x.size(0)
        if tokens == 0 or B == 0:
            raise ValueError(f"{module}: x must have at least one token, got {tuple(x.shape)}")
        T = check.longest(module, "max_seqlen", max_seqlen, offsets)
        # The place (step, sequence) of each token in (T, B).
        sequence = torch.arange(B, device=x.device).repeat_interleave(lengths, output_size=tokens)
        step = torch.arange(tokens, device=x.device) - offsets[sequence]
        padded = x.new_zeros(T, B, x.size(1)).index_put((step, sequence), x)
        y, final = self._run(padded, state, Order(lengths, None))
        return y[step, sequence], final

    def _run_nested(self, x: Tensor, state: Any) -> tuple[Tensor, Any]:
        """Computes `forward` for a nested tensor (B, ragged, input_size)."""
        if x.lengths() is not None:  # type: ignore[attr-defined]  # only nested tensors have it
            x = x.contiguous()  # without holes between the sequences
        offsets: Tensor = x.offsets()  # type: ignore[attr-defined]
        longest: int | None = x._maybe_max_seqlen  # type: ignore[attr-defined]  # None: not known
        if longest is not None and torch.compiler.is_compiling():
            # Code is compiled for each value: torch cannot guard the symbol of a nested tensor's
            # longest sequence, and the length of a list is a number in its place.
            longest = len([None] * longest)
        y, final = self._run_ragged(x.values(), state, offsets, longest)
        return nested_as(x, y), final

    def _run_unbatched(
        self, x: Tensor, state: Any, lengths: Tensor | Sequence[int] | None, starts: Tensor | None
    ) -> tuple[Tensor, Any]:
        """Computes `forward` for x (T, input_size) and states without a batch dimension."""
        module = type(self).__name__
        if lengths is not None:
            raise ValueError(
                f"{module}: lengths must be None for an x without a batch dimension, got lengths"
            )
        form = self._form
        if state is not None:
            state = form.whole([[t[None] for t in s] for s in form.parts(state, is_batched=False)])
        starts = None if starts is None else starts[:, None]
        y, final = self._run(x[:, None], state, Order(None, starts))
        parts = [s[:, 0] if isinstance(s, Tensor) else [t[0] for t in s] for s in form.parts(final)]
        return y[:, 0], form.whole(parts)

    @property
    def _form(self) -> StateForm:
        """The form of the module's states."""
        directions = len(self._directions())
        return StateForm(type(self).__name__, self.STATE, self.num_layers, directions)

    def _run(self, x: Tensor, state: Any, order: Order) -> tuple[Tensor, Any]:
        """Computes `forward` for x (T, B, input_size)."""
        form = self._form
        if state is None:
            widths = {
                "h": [self._output_size(H) for _, H in self.sizes for _ in self._directions()],
                "c": [H for _, H in self.sizes for _ in self._directions()],
            }
            parts: Sequence[OfLayers] = [zeros_of(x, widths[name]) for name in self.STATE]
        else:
            parts = form.parts(state)
        initial = list(zip(*parts, strict=True))
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
        last = [list(part) for part in zip(*final, strict=True)]
        if len({H for _, H in self.sizes}) == 1:
            return total, form.whole([torch.stack(part) for part in last])
        return total, form.whole(last)
