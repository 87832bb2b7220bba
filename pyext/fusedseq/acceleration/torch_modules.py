"""Subclasses of torch's modules whose forward calls the fused operators.

A module becomes one of these by assignment to its `__class__`: parameters, buffers, hooks, options
and the names in its state dict are those of torch's module, because the object is the same. A
subclass adds methods and class attributes alone. What an operator cannot compute (a dtype, a sparse
tensor, a nested tensor with a gradient, a sublayer with a hook) goes to torch's own forward, at
each call, and so does everything that torch.jit.trace records.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from fusedseq import fused
from fusedseq import nn as ours
from fusedseq.acceleration.deferred_logits import defer
from fusedseq.fused import autocast, check, transforms
from fusedseq.fused.projected_lstm import DEVICES as PROJECTING
from fusedseq.nn.dropout import draw_seed
from fusedseq.nn.sublayers import has_hooks


def is_supported(x: Any) -> bool:
    """Returns whether x is a plain tensor which every operator computes on its device.

    The operators compute in the dtype of x, and under autocast products in autocast's.
    """
    if not isinstance(x, Tensor) or x.is_nested or x.layout != torch.strided:
        return False
    if torch.jit.is_tracing():
        return False
    kind = x.device.type
    known = check.DTYPES.get(kind, check.DTYPES["cpu"])
    is_cast = autocast.is_cast(x) and autocast.is_on(kind)
    return x.dtype in known and (not is_cast or torch.get_autocast_dtype(kind) in known)


class Linear(nn.Linear):
    """torch.nn.Linear over the operator `linear`."""

    is_linear = True

    def forward(self, input: Tensor) -> Tensor:
        if not is_supported(input) or self.weight.layout != torch.strided:
            return super().forward(input)
        return fused.linear(input, self.weight, self.bias)


class OutputLinear(Linear):
    """The output layer of a model, whose logits are deferred in training."""

    def forward(self, input: Tensor) -> Tensor:
        # torch.compile cannot trace what can_defer asks.
        if self.training and not torch.compiler.is_compiling():
            tensors = autocast.cast(input.device.type, input, self.weight, self.bias)
            if can_defer(self, *tensors):
                return defer(*tensors)
        return super().forward(input)


def can_defer(layer: nn.Linear, x: Tensor, W: Tensor, b: Tensor | None) -> bool:
    """Returns whether a gradient is recorded, and the layer's tensors stay valid after its call.

    Sharding of parameters over processes frees them after the call, and hooks see the result.
    """
    tensors = [t for t in (x, W, b) if t is not None]
    return (
        torch.is_grad_enabled()
        and all(type(t) in (Tensor, nn.Parameter) and is_supported(t) for t in tensors)
        and all((t.dtype, t.device) == (x.dtype, x.device) for t in tensors)
        and any(t.requires_grad for t in tensors)
        and not any(t.is_inference() for t in tensors)
        and not has_hooks(layer)
        and not torch.jit.is_tracing()
        and not torch._C._are_functorch_transforms_active()
        and not transforms.has_tangents(tensors)
        and not (torch.distributed.is_available() and torch.distributed.is_initialized())
    )


class Dropout(nn.Dropout):
    """torch.nn.Dropout over the operator `dropout`."""

    def forward(self, input: Tensor) -> Tensor:
        if not (self.training and self.p) or self.inplace or not is_supported(input):
            return super().forward(input)
        return fused.dropout(input, self.p, draw_seed(input.device))


class Embedding(ours.Embedding, nn.Embedding):
    """torch.nn.Embedding over the operator `embedding`."""

    dropout = 0.0
    _embedding = staticmethod(fused.embedding)
    reset_parameters = nn.Embedding.reset_parameters
    extra_repr = nn.Embedding.extra_repr

    def forward(self, input: Tensor) -> Tensor:
        is_plain = isinstance(input, Tensor) and not input.is_nested
        if not is_plain or input.layout != torch.strided or not is_supported(self.weight):
            return nn.Embedding.forward(self, input)
        return ours.Embedding.forward(self, input)


class Recurrent(ours.recurrent.Recurrent):
    """What the replacements of torch's recurrent modules share."""

    residual, output = False, "last"
    weight_drop, variational = 0.0, False
    # torch's constructor has set the attributes. These come before the properties of our modules.
    dropout, mode = 0.0, ""
    flatten_parameters = nn.RNNBase.flatten_parameters
    all_weights = nn.RNNBase.all_weights

    @property
    def sizes(self) -> list[tuple[int, int]]:  # type: ignore[override]
        """(X, H) of each layer."""
        H = self.hidden_size
        below = len(self._directions()) * self._output_size(H)
        return [(self.input_size if l == 0 else below, H) for l in range(self.num_layers)]

    def layer_dropout(self, x: Tensor) -> Tensor:
        """Drops elements of the input of a layer above the first, each step with its own mask."""
        if not (self.training and self.dropout):
            return x
        return fused.dropout(x, self.dropout, draw_seed(x.device))

    def _has_operator(self, x: Any) -> bool:
        return is_supported(x)

    # The interface is that of torch's module, not of ours.
    def forward(self, input: Any, hx: Any = None) -> Any:  # type: ignore[override]
        x = input.data if isinstance(input, PackedSequence) else input
        torch_class: Any = next(c for c in (nn.LSTM, nn.GRU, nn.RNN) if isinstance(self, c))
        if not self._has_operator(x):
            return torch_class.forward(self, input, hx)
        return ours.recurrent.Recurrent.forward(self, input, hx)


class LSTM(Recurrent, ours.LSTM, nn.LSTM):
    """torch.nn.LSTM over the operators `lstm`, `bidirectional_lstm` and `projected_lstm`."""

    _lstm = staticmethod(fused.lstm)
    _bidirectional_lstm = staticmethod(fused.bidirectional_lstm)
    reset_parameters = nn.LSTM.reset_parameters
    extra_repr = nn.LSTM.extra_repr
    _apply = nn.LSTM._apply

    def _has_operator(self, x: Any) -> bool:
        """A projection goes to torch where `projected_lstm` has no kernels: its call of `lstm` has
        more operations.
        """
        if self.proj_size and isinstance(x, Tensor) and x.device.type not in PROJECTING:
            return False
        return is_supported(x)


class GRU(Recurrent, ours.GRU, nn.GRU):
    """torch.nn.GRU over the operator `gru`."""

    _gru = staticmethod(fused.gru)
    reset_parameters = nn.GRU.reset_parameters
    extra_repr = nn.GRU.extra_repr
    _apply = nn.GRU._apply


class RNN(Recurrent, ours.RNN, nn.RNN):
    """torch.nn.RNN over the operator `rnn`."""

    _rnn = staticmethod(fused.rnn)
    reset_parameters = nn.RNN.reset_parameters
    extra_repr = nn.RNN.extra_repr
    _apply = nn.RNN._apply


class MultiheadAttention(ours.MultiheadAttention, nn.MultiheadAttention):
    """torch.nn.MultiheadAttention over the operators `attention` and `linear`.

    The operator stores no probabilities, so torch's own forward computes calls that ask for them.
    """

    positions = scale = None
    _attention, _linear = staticmethod(fused.attention), staticmethod(fused.linear)
    _attention_varlen = staticmethod(fused.attention_varlen)
    reset_parameters = nn.MultiheadAttention._reset_parameters
    extra_repr = nn.Module.extra_repr

    def forward(  # type: ignore[override]  # as torch's
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        options: dict[str, Any] = {
            "key_padding_mask": key_padding_mask,
            "need_weights": need_weights,
            "attn_mask": attn_mask,
            "average_attn_weights": average_attn_weights,
            "is_causal": is_causal,
        }
        tensors = (query, key, value)
        if need_weights or has_hooks(self.out_proj) or not all(map(is_supported, tensors)):
            return nn.MultiheadAttention.forward(self, query, key, value, **options)
        return ours.MultiheadAttention.forward(self, query, key, value, **options)
