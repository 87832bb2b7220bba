"""Subclasses of torch's Transformer layers whose forward calls the fused operators.

They are as those of torch_modules.py. A fused layer calls its attention. What its other sublayers
would compute it computes itself, from their parameters and options: a dropout, the residual sum and
a norm in one pass; a bias, the activation and a dropout of the feed-forward part in another.
"""

import itertools
from typing import Any

import torch
from torch import Tensor, nn

from fusedseq import fused
from fusedseq import nn as ours
from fusedseq.acceleration import torch_modules
from fusedseq.acceleration.torch_modules import is_supported
from fusedseq.fused import autocast
from fusedseq.nn.dropout import draw_seed
from fusedseq.nn.feed_forward import known_activation
from fusedseq.nn.sublayers import has_hooks, is_as_defined


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
    "linear": (nn.Linear, torch_modules.Linear, torch_modules.OutputLinear),
    "norm": (nn.LayerNorm,),
    "dropout": (nn.Dropout, torch_modules.Dropout),
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


def norms_of(layer: Any) -> list[nn.LayerNorm]:
    """The norms of a Transformer layer of torch."""
    return [norm for norm in layer.children() if isinstance(norm, nn.LayerNorm)]


def is_computed(norm: nn.LayerNorm, x: Tensor) -> bool:
    """Returns whether the operator residual_layer_norm can compute a norm of x: a norm over the
    last dimension alone, whose parameters have the dtype of x unless autocast promotes both.
    """
    parameters = [p for p in (norm.weight, norm.bias) if p is not None]
    fits = all(p.dtype == x.dtype for p in parameters) or autocast.is_on(x.device.type)
    return len(norm.normalized_shape) == 1 and fits


def is_fused(layer: Any, x: Tensor) -> bool:
    """Returns whether the fused operators can compute a Transformer layer of torch for x."""
    return is_plain(layer) and all(is_computed(norm, x) for norm in norms_of(layer))


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
        and isinstance(attention, torch_modules.MultiheadAttention)
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
        if not has_mask and is_padded_batch(self, src) and is_fused(self, src):
            return run_nested(self, src)
        if not is_supported(src) or not is_fused(self, src):
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
        if not is_supported(tgt) or not is_supported(memory) or not is_fused(self, tgt):
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
