"""`accelerate`: finds the modules that fused operators compute faster, and replaces their class."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import nn

from fusedseq.acceleration import (
    awd_lstm,
    gains,
    hugging_face,
    losses,
    torch_modules,
    transformer_layers,
)
from fusedseq.acceleration.report import Entry, Report
from fusedseq.acceleration.subclass import Accelerated, extend
from fusedseq.acceleration.torch_modules import has_hooks
from fusedseq.fused import check
from fusedseq.nn.feed_forward import known_activation

Reason = str  # why a module is left as it is, "" if it can be replaced


def dropout_reason(module: Any) -> Reason:
    return "inplace is not supported" if module.inplace else ""


def embedding_reason(module: Any) -> Reason:
    if module.max_norm is not None or module.scale_grad_by_freq:
        return "max_norm and scale_grad_by_freq are not supported"
    return ""


def recurrent_reason(module: Any) -> Reason:
    if any(name not in module._parameters for names in module._all_weights for name in names):
        return "a weight is not a parameter of the module"
    return ""


def attention_reason(module: Any) -> Reason:
    if module.bias_k is not None or module.add_zero_attn:
        return "add_bias_kv and add_zero_attn are not supported"
    if has_hooks(module.out_proj):
        return "out_proj has a hook, and the fused module does not call out_proj"
    return ""


def layer_reason(module: Any) -> Reason:
    if known_activation(module.activation) is None:
        return f"the activation {module.activation!r} has no fused operator"
    if not transformer_layers.is_plain(module):
        return "a sublayer has a hook or another forward, or is not torch's own class"
    if any(len(norm.normalized_shape) > 1 for norm in transformer_layers.norms_of(module)):
        return "a norm of several dimensions has no fused operator"
    return ""


# {torch's class: (its replacement, why a module of it is left)}
KINDS: dict[type[nn.Module], tuple[type[nn.Module], Callable[[Any], Reason]]] = {
    nn.LSTM: (torch_modules.LSTM, recurrent_reason),
    nn.GRU: (torch_modules.GRU, recurrent_reason),
    nn.RNN: (torch_modules.RNN, recurrent_reason),
    nn.MultiheadAttention: (torch_modules.MultiheadAttention, attention_reason),
    nn.TransformerEncoderLayer: (transformer_layers.TransformerEncoderLayer, layer_reason),
    nn.TransformerDecoderLayer: (transformer_layers.TransformerDecoderLayer, layer_reason),
    nn.Dropout: (torch_modules.Dropout, dropout_reason),
    nn.Embedding: (torch_modules.Embedding, embedding_reason),
    nn.Linear: (torch_modules.Linear, lambda module: ""),
    **{kind: (new, lambda module: "") for kind, new in losses.KINDS.items()},
}
REPLACEMENTS = (Accelerated, *(new for new, _ in KINDS.values()))


def find_output(model: nn.Module, loss: Any, output: str | None) -> nn.Module | None:
    """Returns the output layer, whose logits the loss takes, or None without a loss.

    Errors: see `accelerate`
    """
    if loss is None:
        if output is not None:
            raise ValueError(f"accelerate: output must be None without a loss, got {output!r}")
        return None
    if not isinstance(loss, nn.CrossEntropyLoss):
        raise TypeError(
            f"accelerate: loss must be a torch.nn.CrossEntropyLoss, got {type(loss).__name__}"
        )
    kinds = nn.Linear, torch_modules.Linear, torch_modules.OutputLinear
    found = {name: m for name, m in model.named_modules() if type(m) in kinds}
    if output is None:
        if not found:
            raise ValueError("accelerate: with a loss, model must have a torch.nn.Linear, got none")
        return [*found.values()][-1]
    if output not in found:
        raise ValueError(
            f"accelerate: output must be the name of a torch.nn.Linear in the model, such as "
            f"{[*found][-1:]}, got {output!r}"
        )
    return found[output]


def accelerate(
    model: nn.Module,
    *,
    loss: nn.CrossEntropyLoss | None = None,
    output: str | None = None,
    dry_run: bool = False,
) -> Report:
    """Makes fused operators compute the modules of a model, in place and recursively.

    A module of a supported class of torch.nn (LSTM, GRU, RNN, MultiheadAttention,
    TransformerEncoderLayer and TransformerDecoderLayer, also inside TransformerEncoder,
    TransformerDecoder and Transformer, Dropout, Embedding, Linear and LinearCrossEntropyLoss) gets
    a subclass of its class. The object, its parameters, their names, and its hooks stay the same,
    so optimizers, tied weights and state dicts go on working. An LSTM with a proj_size calls torch
    on a GPU, where torch has fewer operations. AWD-LSTM's WeightDrop and LockedDropout, and blocks
    of GPT-2 and BERT in transformers, are treated the same, and models of transformers get the
    attention implementation "fusedseq".

    model: any module
    loss: the loss of the model's logits. In training mode its output layer then returns
        `DeferredLogits`: torch's cross_entropy computes loss and gradients of them by
        `fused.linear_cross_entropy`, and anything else gets ordinary logits.
    output: with a loss, the name of the output layer, by default the last torch.nn.Linear
    dry_run: report only, and change nothing
    returns a Report, which says what was replaced and why another module was not, prints as a
    table, and undoes the replacement
    In eval mode outputs are the same up to rounding. In training mode elements are dropped with the
    same probabilities, but with other random masks.
    Errors: TypeError for a model that is not a torch.nn.Module, a loss that is not a
    torch.nn.CrossEntropyLoss, or a dry_run that is not a bool; ValueError for an output that names
    no torch.nn.Linear or comes without a loss. A training step raises RuntimeError if the input or
    the parameters of the output layer are changed in place before the loss is computed.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"accelerate: model must be a torch.nn.Module, got {type(model).__name__}")
    check.flag("accelerate", "dry_run", dry_run)
    output_layer = find_output(model, loss, output)
    report = Report(dry_run=dry_run)
    chosen: list[tuple[nn.Module, type[nn.Module]]] = []
    computed_by_others: set[nn.Module] = set()  # sublayers that a replaced module does not call
    weight_dropped: set[nn.Module] = set()
    for name, module in model.named_modules():
        found = candidate(module, output_layer, weight_dropped)
        if module in computed_by_others:
            continue
        after: type[nn.Module] = type(module)
        if found is not None:
            reason = found.reason
            if "forward" in vars(module):
                reason = "its forward was replaced in the object"
            gain = "unknown" if reason else found.gain
            report.entries.append(Entry(name, type(module).__name__, not reason, reason, gain))
            if not reason:
                after = found.new
                chosen.append((module, after))
        if issubclass(after, awd_lstm.WeightDrop):
            weight_dropped.add(module.get_submodule("module"))
        if issubclass(after, REPLACEMENTS):
            computed_by_others |= sublayers(module)
    models = transformers_models(model, report)
    if not dry_run:
        for module, new in chosen:
            report.changed.append((module, type(module), new))
            module.__class__ = new
        report.undos += [hugging_face.replace_attention(found) for found in models]
    return report


@dataclass(frozen=True)
class Candidate:
    """A module that is of a kind that can be replaced.

    new: its class afterwards, if there is no reason to leave it
    """

    new: type[nn.Module]
    reason: Reason
    gain: str


def sublayers(module: nn.Module) -> set[nn.Module]:
    """Returns the sublayers that a replaced module computes by its own operators, and that have no
    replacement of their own.
    """
    found: set[nn.Module] = {m for m in module.children() if isinstance(m, nn.LayerNorm)}
    return found | {module.out_proj} if isinstance(module, nn.MultiheadAttention) else found


def candidate(
    module: nn.Module, output_layer: nn.Module | None, weight_dropped: set[nn.Module]
) -> Candidate | None:
    """Returns what can be done with a module, or None if its class has no replacement.

    weight_dropped: LSTMs whose recurrent weights a replaced WeightDrop sets
    """
    if module is output_layer and not isinstance(module, torch_modules.OutputLinear):
        return Candidate(torch_modules.OutputLinear, "", gains.of("output layer"))
    if isinstance(module, REPLACEMENTS):
        return None
    if type(module) is nn.LayerNorm:
        return Candidate(
            nn.LayerNorm, "only a LayerNorm with its residual has a fused operator", "unknown"
        )
    if (block := hugging_face.find(module)) is not None:
        computed_by, reason = block
        gain = gains.of(type(module).__name__)
        return Candidate(extend(computed_by, type(module)), reason, gain)
    if (named := awd_lstm.KINDS.get(type(module).__name__)) is not None:
        computed_by, reason_of = named
        gain = gains.of(type(module).__name__)
        return Candidate(extend(computed_by, type(module)), reason_of(module), gain)
    kind = next((k for k in KINDS if isinstance(module, k)), None)
    if kind is None:
        return None
    new, reason_of = KINDS[kind]
    gain = gains.of(measured_as(module, kind))
    if module in weight_dropped:
        return Candidate(new, "", gain)
    if type(module) is not kind:
        reason = f"it is a subclass of {kind.__name__}, which may compute something else"
        return Candidate(new, reason, gain)
    return Candidate(new, reason_of(module), gain)


def measured_as(module: Any, kind: type[nn.Module]) -> str:
    """Returns the kind whose gain was measured."""
    if kind in losses.KINDS:
        return kind.__name__ + " in chunks" * (module.options is not None)
    if kind is not nn.LSTM:
        return kind.__name__
    words = "projected" * bool(module.proj_size), "bidirectional" * module.bidirectional, "LSTM"
    return " ".join(word for word in words if word)


def transformers_models(model: nn.Module, report: Report) -> list[nn.Module]:
    """Returns the models of transformers whose attention is replaced, and reports all of them."""
    found: list[Any] = []
    configurations: list[Any] = []
    for name, module in model.named_modules():
        if not hugging_face.is_model(module):
            continue
        known: Any = module
        if any(known.config is config for config in configurations):
            continue
        configurations.append(known.config)
        reason = hugging_face.attention_reason(known)
        if known.config._attn_implementation != hugging_face.ATTENTION:
            kind = f"attention of {type(known).__name__}"
            gain = "unknown" if reason else gains.of(f"attention of {known.config.model_type}")
            report.entries.append(Entry(name, kind, not reason, reason, gain))
        if not reason:
            found.append(known)
    return found
