"""Blocks and attention of GPT-2 and BERT in Hugging Face `transformers`, which is never imported:
a model of it can only exist where it has been.
"""

import functools
import sys
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from fusedseq import fused
from fusedseq.acceleration import torch_modules
from fusedseq.acceleration.subclass import Accelerated
from fusedseq.acceleration.torch_modules import is_supported
from fusedseq.acceleration.transformer_layers import is_computed, residual_norm
from fusedseq.nn.feed_forward import known_activation
from fusedseq.nn.sublayers import is_as_defined

# Model types whose attention is compared with eager attention by the tests.
ATTENTION_OF = ("bert", "gpt2", "llama", "mistral")
ATTENTION = "fusedseq"


def activation_of(module: Any) -> str | None:
    """Returns the operator's name of an activation of transformers, or None if it has none, or if
    somebody hooks into its module.
    """
    if isinstance(module, nn.Module) and not is_as_defined(module):
        return None
    function = module
    if type(module).__module__ == "transformers.activations":
        name = type(module).__name__
        if name == "NewGELUActivation":
            return "gelu_tanh"
        function = getattr(module, "act", module)
        if isinstance(function, functools.partial) and function.keywords == {"approximate": "tanh"}:
            return "gelu_tanh"
    return known_activation(function)


def sublayers_are_plain(module: nn.Module, *names: str) -> bool:
    """Returns whether the sublayers that a fused block does not call have no hooks and their own
    classes' forward.
    """
    ours = (torch_modules.Linear, torch_modules.OutputLinear, torch_modules.Dropout)
    kinds = (nn.Linear, nn.LayerNorm, nn.Dropout, *ours)
    for name in names:
        child = getattr(module, name)
        kind = (type(child).__module__, type(child).__name__)
        is_conv = kind == ("transformers.pytorch_utils", "Conv1D") or isinstance(child, Conv1D)
        if not (type(child) in kinds or is_conv) or not is_as_defined(child):
            return False
    return True


class Conv1D(Accelerated, nn.Module):
    """Conv1D: a linear layer whose weight is stored transposed."""

    def forward(self, x: Tensor) -> Tensor:
        """Returns x W + b for x (..., K) and the weight W (K, N)."""
        if not is_supported(x):
            unfused: Tensor = super().forward(x)
            return unfused
        return fused.linear(x, self.weight.t(), self.bias)


class Gpt2FeedForward(Accelerated, nn.Module):
    """GPT2MLP: dropout(c_proj(act(c_fc(x)))), whose weights are stored transposed."""

    def forward(self, hidden_states: Tensor) -> Tensor:
        """Applies the block to (..., D)."""
        x, activation = hidden_states, activation_of(self.act)
        names = ("c_fc", "c_proj", "dropout")
        if not is_supported(x) or activation is None or not sublayers_are_plain(self, *names):
            unfused: Tensor = super().forward(x)
            return unfused
        first, second = self.c_fc, self.c_proj
        hidden = fused.linear(x, first.weight.t())
        hidden = fused.bias_activation_dropout(hidden, first.bias, activation)
        y: Tensor = self.dropout(fused.linear(hidden, second.weight.t(), second.bias))
        return y


class Gpt2Block(Accelerated, nn.Module):
    """GPT2Block: x + attn(ln_1(x)), and then x + mlp(ln_2(x)); the first sum in one pass with ln_2.

    What follows x is positional in the models of transformers: the cache, the mask, and the states
    of an encoder, for which the block has attention that is not fused.
    """

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Applies the block to (B, L, D)."""
        x = hidden_states
        of_encoder = args[2:] or (kwargs.get("encoder_hidden_states"),)
        is_plain = of_encoder[0] is None and sublayers_are_plain(self, "ln_2")
        if not is_plain or not is_supported(x) or not is_computed(self.ln_2, x):
            unfused: Tensor = super().forward(x, *args, **kwargs)
            return unfused
        options = {k: value for k, value in kwargs.items() if not k.startswith("encoder_")}
        attended, _ = self.attn(self.ln_1(x), *args[:2], **options)
        norm = self.ln_2
        y, total = fused.residual_layer_norm(
            attended, x, norm.weight, norm.bias, eps=norm.eps, prenorm=True
        )
        z: Tensor = total + self.mlp(y)
        return z


class BertIntermediate(Accelerated, nn.Module):
    """BertIntermediate: act(dense(x))."""

    def forward(self, hidden_states: Tensor) -> Tensor:
        """Applies the block to (..., D)."""
        x, activation = hidden_states, activation_of(self.intermediate_act_fn)
        if not is_supported(x) or activation is None or not sublayers_are_plain(self, "dense"):
            unfused: Tensor = super().forward(x)
            return unfused
        hidden = fused.linear(x, self.dense.weight)
        return fused.bias_activation_dropout(hidden, self.dense.bias, activation)


class BertOutput(Accelerated, nn.Module):
    """BertSelfOutput and BertOutput: LayerNorm(dropout(dense(x)) + input)."""

    def forward(self, hidden_states: Tensor, input_tensor: Tensor) -> Tensor:
        """Applies the block to x (..., X), with the residual (..., D)."""
        x, residual = hidden_states, input_tensor
        is_plain = sublayers_are_plain(self, "dense", "dropout", "LayerNorm")
        are_supported = is_supported(x) and is_supported(residual)
        if not is_plain or not are_supported or not is_computed(self.LayerNorm, residual):
            unfused: Tensor = super().forward(x, residual)
            return unfused
        y = fused.linear(x, self.dense.weight, self.dense.bias)
        found: Tensor = residual_norm(self.LayerNorm, self.dropout, y, residual, prenorm=False)
        return found


GPT2, BERT = (f"models.{model}.modeling_{model}" for model in ("gpt2", "bert"))
# {(the module in transformers, the class): (what computes it, the attribute with its activation or
# "")}
KINDS: dict[tuple[str, str], tuple[type[Accelerated], str]] = {
    ("pytorch_utils", "Conv1D"): (Conv1D, ""),
    (GPT2, "GPT2MLP"): (Gpt2FeedForward, "act"),
    (GPT2, "GPT2Block"): (Gpt2Block, ""),
    (BERT, "BertIntermediate"): (BertIntermediate, "intermediate_act_fn"),
    (BERT, "BertSelfOutput"): (BertOutput, ""),
    (BERT, "BertOutput"): (BertOutput, ""),
}


def find(module: nn.Module) -> tuple[type[Accelerated], str] | None:
    """Returns what computes a block of transformers and why it is left, or None for another."""
    kind = type(module)
    for (within, name), (computed_by, attribute) in KINDS.items():
        path = f"transformers.{within}"
        if (kind.__module__, kind.__name__) != (path, name):
            continue
        if getattr(sys.modules.get(path), name, None) is not kind:
            return None
        if attribute:
            act = getattr(module, attribute)
            if activation_of(act) is None:
                return computed_by, f"the activation {act!r} has no fused operator or is hooked"
        return computed_by, ""
    return None


def is_model(module: nn.Module) -> bool:
    """Returns whether a module is a PreTrainedModel of transformers."""
    modeling = sys.modules.get("transformers.modeling_utils")
    return modeling is not None and isinstance(module, modeling.PreTrainedModel)


def attention_reason(model: Any) -> str:
    """Returns why the attention implementation of a PreTrainedModel is left as it is."""
    config, now = model.config, model.config._attn_implementation
    if now == ATTENTION:
        return "it is fusedseq already"
    if now not in ("eager", "sdpa"):
        return f"its attention implementation is {now!r}, not 'eager' or 'sdpa'"
    if config.model_type not in ATTENTION_OF or not model._can_set_attn_implementation():
        return (
            f"{config.model_type} is not one of {', '.join(ATTENTION_OF)}; try "
            'model.set_attn_implementation("fusedseq")'
        )
    if getattr(config, "output_attentions", False):
        return "output_attentions is set, and the fused attention returns no probabilities"
    from fusedseq.integrations.transformers import require_transformers

    try:
        require_transformers()
    except ImportError as error:
        return str(error)
    return ""


def replace_attention(model: Any) -> Callable[[], None]:
    """Makes a PreTrainedModel use the fused attention; returns what undoes it."""
    from fusedseq.integrations.transformers import register

    register()
    before = model.config._attn_implementation
    model.set_attn_implementation(ATTENTION)

    def undo() -> None:
        if model.config._attn_implementation == ATTENTION:
            model.set_attn_implementation(before)

    return undo
