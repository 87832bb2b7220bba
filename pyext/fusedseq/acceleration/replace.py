"""`accelerate`: finds the modules that fused operators compute faster, and replaces their class."""

from collections.abc import Callable
from typing import Any

from torch import nn

from fusedseq.acceleration import torch_modules
from fusedseq.acceleration.report import Entry, Report
from fusedseq.acceleration.torch_modules import has_hooks
from fusedseq.nn.feed_forward import activation_name

Reason = str  # why a module is left as it is, "" if it can be replaced


def dropout_reason(module: Any) -> Reason:
    return "inplace is not supported" if module.inplace else ""


def embedding_reason(module: Any) -> Reason:
    if module.max_norm is not None or module.scale_grad_by_freq:
        return "max_norm and scale_grad_by_freq are not supported"
    return ""


def lstm_reason(module: Any) -> Reason:
    if module.bidirectional or module.proj_size:
        return "bidirectional and proj_size are not supported"
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
    try:
        activation_name(module.activation, type(module).__name__)
    except ValueError:
        return f"the activation {module.activation!r} has no fused operator"
    if not torch_modules.is_plain(module):
        return "a sublayer has a hook or is not torch's own class"
    return ""


# {torch's class: (its replacement, why a module of it is left, gain in docs/benchmarks.md)}
KINDS: dict[type[nn.Module], tuple[type[nn.Module], Callable[[Any], Reason], str]] = {
    nn.LSTM: (torch_modules.LSTM, lstm_reason, "1.00x to 4.10x"),
    nn.MultiheadAttention: (torch_modules.MultiheadAttention, attention_reason, "unknown"),
    nn.TransformerEncoderLayer: (
        torch_modules.TransformerEncoderLayer,
        layer_reason,
        "2.46x to 3.70x",
    ),
    nn.TransformerDecoderLayer: (torch_modules.TransformerDecoderLayer, layer_reason, "unknown"),
    nn.Dropout: (torch_modules.Dropout, dropout_reason, "20.29x"),
    nn.Embedding: (torch_modules.Embedding, embedding_reason, "unknown"),
    nn.Linear: (torch_modules.Linear, lambda module: "", "2.10x"),
}
OUTPUT_GAIN = "2.70x to 3.04x"  # with the loss; also from docs/benchmarks.md


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
    found = {n: m for n, m in model.named_modules() if type(m) in (nn.Linear, torch_modules.Linear)}
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

    A module of a supported class of torch.nn (LSTM, MultiheadAttention, TransformerEncoderLayer and
    TransformerDecoderLayer, also inside TransformerEncoder, TransformerDecoder and Transformer,
    Dropout, Embedding and Linear) gets a subclass of its class. The object, its parameters, their
    names, and its hooks stay the same, so optimizers, tied weights and state dicts go on working.

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
    Errors: TypeError for a model that is not a torch.nn.Module, or a loss that is not a
    torch.nn.CrossEntropyLoss; ValueError for an output that names no torch.nn.Linear or comes
    without a loss. A training step raises RuntimeError if the input or the parameters of the output
    layer are changed in place before the loss is computed.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"accelerate: model must be a torch.nn.Module, got {type(model).__name__}")
    output_layer = find_output(model, loss, output)
    report = Report(dry_run=dry_run)
    chosen: list[tuple[nn.Module, type[nn.Module]]] = []
    replacements = tuple(new for new, _, _ in KINDS.values())
    for name, module in model.named_modules():
        kind = next((k for k in KINDS if isinstance(module, k)), None)
        if kind is None or (isinstance(module, replacements) and module is not output_layer):
            continue
        new, reason_of, gain = KINDS[kind]
        if module is output_layer:
            new, reason, gain = torch_modules.OutputLinear, "", OUTPUT_GAIN
        elif type(module) is kind:
            reason = reason_of(module)
        else:
            reason = f"it is a subclass of {kind.__name__}, which may compute something else"
        if "forward" in vars(module):
            reason = "its forward was replaced in the object"
        report.entries.append(
            Entry(name, type(module).__name__, not reason, reason, "unknown" if reason else gain)
        )
        if not reason:
            chosen.append((module, new))
    if not dry_run:
        for module, new in chosen:
            report.changed.append((module, type(module), new))
            module.__class__ = new
    return report
