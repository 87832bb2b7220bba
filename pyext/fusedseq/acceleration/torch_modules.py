"""Subclasses of torch's modules whose forward calls the fused operators.

A module becomes one of these by assignment to its `__class__`: parameters, buffers, hooks, options
and the names in its state dict are those of torch's module, because the object is the same. A
subclass adds methods and class attributes alone. What an operator cannot compute (a dtype, a nested
tensor with a gradient, a sublayer with a hook) goes to torch's own forward, at each call.
"""

import itertools
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
from fusedseq.nn.feed_forward import known_activation


def is_supported(x: Any) -> bool:
    """Returns whether x is a plain tensor which every operator computes on its device.

    The operators compute in the dtype of x, and under autocast products in autocast's.
    """
    if not isinstance(x, Tensor) or x.is_nested:
        return False
    kind = x.device.type
    known = check.DTYPES.get(kind, check.DTYPES["cpu"])
    is_cast = autocast.is_cast(x) and autocast.is_on(kind)
    return x.dtype in known and (not is_cast or torch.get_autocast_dtype(kind) in known)


def has_hooks(module: nn.Module) -> bool:
    """Returns whether somebody reads or changes what goes into the module or comes out of it.

    Hooks of all modules, such as torch.nn.modules.module.register_module_forward_hook adds, are
    among them. Hooks of a state dict are not: a fused layer leaves its sublayers where they are.
    """
    return bool(
        module._forward_hooks
        or module._forward_pre_hooks
        or module._backward_hooks
        or module._backward_pre_hooks
        or torch.nn.modules.module._has_any_global_hook()
    )


def is_as_defined(module: nn.Module) -> bool:
    """Returns whether a call of the module is its class's forward, without hooks."""
    return "forward" not in vars(module) and not has_hooks(module)


class Linear(nn.Linear):
    """torch.nn.Linear over the operator `linear`."""

    def forward(self, input: Tensor) -> Tensor:
        if not is_supported(input):
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

    def forward(self, ids: Tensor) -> Tensor:
        if not is_supported(self.weight):
            return nn.Embedding.forward(self, ids)
        return ours.Embedding.forward(self, ids)


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


def residual_norm(norm: Any, dropout: Any, x: Tensor, residual: Tensor, prenorm: bool) -> Any:
    """Computes norm(residual + dropout(x)) with the options of torch's modules, in one pass.

    x, residual: (..., D)    returns (..., D); with `prenorm` also the sum
    """
    p = dropout.p if dropout.training else 0.0
    seed = draw_seed(x.device) if p else 0
    return fused.residual_layer_norm(
        x, residual, norm.weight, norm.bias, p=p, eps=norm.eps, prenorm=prenorm, seed=seed
    )


# The classes of the sublayers that a fused Transformer layer does not call, by their names without
# a number.
SUBLAYERS: dict[str, tuple[type[nn.Module], ...]] = {
    "linear": (nn.Linear, Linear, OutputLinear),
    "norm": (nn.LayerNorm,),
    "dropout": (nn.Dropout, Dropout),
}
BLOCKS = {"_sa_block", "_mha_block", "_ff_block"}  # methods that a fused layer does not call


def is_plain(layer: Any) -> bool:
    """Returns whether what a fused layer does not call is torch's own, without hooks: sublayers,
    their forward, the methods of its blocks, and its activation.
    """
    if not BLOCKS.isdisjoint(vars(layer)):
        return False
    for name, module in layer.named_children():
        allowed = SUBLAYERS.get(name.rstrip("123"))
        if allowed and (type(module) not in allowed or not is_as_defined(module)):
            return False
    return is_plain_activation(layer.activation)


def is_plain_activation(activation: Any) -> bool:
    """Returns whether the operator has the activation, and nothing hooks into its module."""
    is_hooked = isinstance(activation, nn.Module) and has_hooks(activation)
    return known_activation(activation) is not None and not is_hooked


def feed_forward(layer: Any, x: Tensor) -> Tensor:
    """Computes linear2(dropout(activation(linear1(x)))) of a Transformer layer of torch."""
    hidden = fused.linear(x, layer.linear1.weight)
    p = layer.dropout.p if layer.dropout.training else 0.0
    seed = draw_seed(x.device) if p else 0
    activation = known_activation(layer.activation)
    assert activation is not None, "is_plain requires it"
    hidden = fused.bias_activation_dropout(hidden, layer.linear1.bias, activation, p, seed)
    return fused.linear(hidden, layer.linear2.weight, layer.linear2.bias)


def run(layer: Any, x: Tensor, attend: list[Any]) -> Tensor:
    """Applies the sublayers of a Transformer layer of torch, each with its residual and norm.

    attend: the attention sublayers as functions of x
    """
    sublayers = [*attend, lambda x: feed_forward(layer, x)]
    count = len(sublayers)
    norms = [getattr(layer, f"norm{i + 1}") for i in range(count)]
    dropouts = [getattr(layer, f"dropout{i + 1}") for i in range(count)]
    if not layer.norm_first:
        for norm, dropout, sublayer in zip(norms, dropouts, sublayers, strict=True):
            x = residual_norm(norm, dropout, sublayer(x), x, prenorm=False)
        return x
    y = sublayers[0](norms[0](x))
    for norm, dropout, sublayer in zip(norms[1:], dropouts, sublayers[1:], strict=False):
        y, x = residual_norm(norm, dropout, y, x, prenorm=True)
        y = sublayer(y)
    return x + dropouts[-1](y)


def is_padded_batch(layer: Any, x: Any) -> bool:
    """Returns whether x is a nested tensor (B, L*, E) that an encoder layer computes fused.

    torch.nn.TransformerEncoder makes one of a padded batch, in eval mode and without a gradient.
    """
    attention = layer.self_attn
    return (
        x.is_nested
        and x.layout == torch.strided
        and x.numel() > 0
        and is_supported(x.values())
        and isinstance(attention, MultiheadAttention)
        and attention.batch_first
        and not layer.training
        and is_as_defined(attention)
        and not has_hooks(attention.out_proj)
        and not (torch.is_grad_enabled() and any(t.requires_grad for t in (x, *layer.parameters())))
    )


def run_nested(layer: Any, x: Tensor) -> Tensor:
    """Applies a Transformer encoder layer of torch to a nested tensor (B, L*, E); returns another.

    The sequences follow each other without padding in the operators' input (rows, E).
    """
    sequences = x.unbind()
    lengths = [len(sequence) for sequence in sequences]
    packed: dict[str, Any] = {
        "cu_seqlens": torch.tensor([0, *itertools.accumulate(lengths)], device=x.device),
        "max_seqlen": max(lengths),
    }

    def attend(rows: Tensor) -> Tensor:
        return ours.MultiheadAttention.forward(layer.self_attn, rows, rows, rows, **packed)[0]

    y = run(layer, torch.cat(sequences), [attend])
    return torch.nested.as_nested_tensor([*y.split(lengths)])


class TransformerEncoderLayer(nn.TransformerEncoderLayer):
    """torch.nn.TransformerEncoderLayer over the fused operators."""

    def forward(
        self,
        src: Tensor,
        src_mask: Tensor | None = None,
        src_key_padding_mask: Tensor | None = None,
        is_causal: bool = False,
    ) -> Tensor:
        has_mask = src_mask is not None or src_key_padding_mask is not None or is_causal
        if not has_mask and is_padded_batch(self, src) and is_plain(self):
            return run_nested(self, src)
        if not is_supported(src) or not is_plain(self):
            return super().forward(src, src_mask, src_key_padding_mask, is_causal)
        options: dict[str, Any] = {"attn_mask": src_mask, "key_padding_mask": src_key_padding_mask}
        options |= {"is_causal": is_causal, "need_weights": False}
        return run(self, src, [lambda x: self.self_attn(x, x, x, **options)[0]])


class TransformerDecoderLayer(nn.TransformerDecoderLayer):
    """torch.nn.TransformerDecoderLayer over the fused operators."""

    def forward(
        self,
        tgt: Tensor,
        memory: Tensor,
        tgt_mask: Tensor | None = None,
        memory_mask: Tensor | None = None,
        tgt_key_padding_mask: Tensor | None = None,
        memory_key_padding_mask: Tensor | None = None,
        tgt_is_causal: bool = False,
        memory_is_causal: bool = False,
    ) -> Tensor:
        if not is_supported(tgt) or not is_supported(memory) or not is_plain(self):
            masks = (tgt_mask, memory_mask, tgt_key_padding_mask, memory_key_padding_mask)
            return super().forward(tgt, memory, *masks, tgt_is_causal, memory_is_causal)
        own: dict[str, Any] = {"attn_mask": tgt_mask, "key_padding_mask": tgt_key_padding_mask}
        own |= {"is_causal": tgt_is_causal, "need_weights": False}
        cross: dict[str, Any] = {
            "attn_mask": memory_mask,
            "key_padding_mask": memory_key_padding_mask,
        }
        cross |= {"is_causal": memory_is_causal, "need_weights": False}
        return run(
            self,
            tgt,
            [
                lambda x: self.self_attn(x, x, x, **own)[0],
                lambda x: self.multihead_attn(x, memory, memory, **cross)[0],
            ],
        )
