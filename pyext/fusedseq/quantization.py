"""Weights in 8 bits for inference on the CPU."""

from collections.abc import Callable

from torch import nn

from fusedseq import nn as ours
from fusedseq.fused.int8_weight import Int8Weight
from fusedseq.models.language_model import LanguageModel
from fusedseq.nn.recurrent import Recurrent

__all__ = ["Int8Weight", "quantize_"]


def quantize_(
    model: nn.Module, filter_fn: Callable[[nn.Module, str], bool] | None = None
) -> list[str]:
    """Rounds the weights of a model to 8 bits, in place, for inference.

    The weights become parameters of the class `Int8Weight`, without gradients: whole numbers in
    [-127, 127] and one fp32 scale for each output, a quarter of the memory of fp32. They are those
    of torch.nn.Linear and of this package's recurrent modules (without proj_size),
    MultiheadAttention and LanguageModel, wherever they are in the model. Biases, embeddings, and
    weights that another module shares, such as a tied output layer's, stay as they are. These still
    require a gradient, and a call that records a gradient dequantizes the weights in 8 bits:
    compute under torch.inference_mode or torch.no_grad, or call model.requires_grad_(False).
    Activations are not rounded to 8 bits. torch's dynamic quantization rounds them, and is faster
    except for linear layers of one or two rows.

    model: in inference mode
    filter_fn: (module, its name in the model) -> whether its weights are rounded; None rounds all
    returns the names of the parameters that were rounded

    Name, order of the arguments and format are those of torchao's `quantize_` with
    `Int8WeightOnlyConfig`.

    Errors: TypeError for a model that is not a torch.nn.Module; ValueError for a model in training
    mode, or a weight that is not finite.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"quantize_: model must be a torch.nn.Module, got {type(model).__name__}")
    training = [name for name, module in model.named_modules() if module.training]
    if training:
        where = f" in {training[0]}" if training[0] else ""
        raise ValueError(
            f"quantize_: model must be in inference mode, got training mode{where}: call "
            "model.eval()"
        )
    owners: dict[int, int] = {}  # of a parameter
    for module in model.modules():
        for parameter in module._parameters.values():
            owners[id(parameter)] = owners.get(id(parameter), 0) + 1
    rounded = []
    for name, module in model.named_modules():
        if filter_fn is not None and not filter_fn(module, name):
            continue
        for weight in weights(module):
            parameter = module._parameters.get(weight)
            if parameter is None or owners[id(parameter)] > 1 or isinstance(parameter, Int8Weight):
                continue
            quantized = Int8Weight.from_float(parameter)
            setattr(module, weight, nn.Parameter(quantized, requires_grad=False))
            rounded.append(f"{name}.{weight}" if name else weight)
    return rounded


def weights(module: nn.Module) -> list[str]:
    """The names of the parameters of a module itself that are weights of matrix products."""
    if isinstance(module, nn.Linear):
        return ["weight"]
    if isinstance(module, ours.MultiheadAttention):
        return ["in_proj_weight", "q_proj_weight", "k_proj_weight", "v_proj_weight"]
    if isinstance(module, LanguageModel):
        return ["decoder_weight"]
    if isinstance(module, Recurrent) and not module.proj_size:
        matrices = ("weight_ih_l", "weight_hh_l", "Q_l", "R_l", "Q_A_l", "Q_B_l", "R_A_l", "R_B_l")
        return [name for name in module._parameters if name.startswith(matrices)]
    return []
