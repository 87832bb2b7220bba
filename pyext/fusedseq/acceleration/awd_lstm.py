"""The classes of the published code of AWD-LSTM (Merity et al., 2018), known by their layout.

Every project has its own copy of `WeightDrop` and `LockedDropout`, so they are recognized by their
names and attributes.
"""

import inspect
import re
from typing import Any

import torch
from torch import Tensor, nn

from fusedseq import fused
from fusedseq.acceleration import torch_modules
from fusedseq.acceleration.subclass import Accelerated
from fusedseq.acceleration.torch_modules import is_supported
from fusedseq.nn.dropout import draw_seed


class LockedDropout(Accelerated, nn.Module):
    """forward(x, dropout) of AWD-LSTM's LockedDropout over the operator `locked_dropout`."""

    def forward(self, x: Tensor, dropout: float | None = None) -> Tensor:
        """Drops elements of x (T, B, D), at all time steps the same; dropout None: the default."""
        kind: Any = type(self).__bases__[1]
        p = default_dropout(kind) if dropout is None else dropout
        if not (self.training and p):
            return x
        if not is_supported(x) or x.dim() != 3 or not 0 <= p < 1:
            dropped: Tensor = super().forward(x, p)
            return dropped
        return fused.locked_dropout(x, p, draw_seed(x.device))


class WeightDrop(Accelerated, nn.Module):
    """AWD-LSTM's WeightDrop over the operator `weight_drop`.

    Its forward sets the dropped weights as attributes of the LSTM, by `_setweights`, and calls the
    LSTM's.
    """

    def _setweights(self) -> None:
        lstm: Any = self.module
        for name in self.weights:
            raw = getattr(lstm, f"{name}_raw")
            if self.training and self.dropout and is_supported(raw):
                dropped = fused.weight_drop(raw, self.dropout, draw_seed(raw.device))
            elif self.training and self.dropout:
                dropped = nn.functional.dropout(raw, self.dropout)
            else:
                dropped = raw.view_as(raw)  # A parameter would be registered under the name.
            setattr(lstm, name, dropped)


def default_dropout(kind: type[nn.Module]) -> float:
    """Returns the default of the argument `dropout` of a LockedDropout class."""
    default: float = inspect.signature(kind.forward).parameters["dropout"].default
    return default


def locked_dropout_reason(module: nn.Module) -> str:
    """Returns why a module named LockedDropout is left as it is, "" if its class is AWD-LSTM's.

    The class is tried on a tensor of ones.
    """
    differs = "its class is not AWD-LSTM's LockedDropout"
    parameters = inspect.signature(type(module).forward).parameters
    if [*parameters] != ["self", "x", "dropout"] or module._modules or module._parameters:
        return differs
    if not isinstance(parameters["dropout"].default, (int, float)):
        return differs
    was_training = module.training
    p, x = 0.5, torch.ones(3, 2, 64, device="cpu")
    try:
        # Neither the random numbers of the program nor the module are changed.
        with torch.device("cpu"), torch.random.fork_rng(devices=[]), torch.no_grad():
            module.training = True
            mask = type(module).forward(module, x, p)
            module.training = False
            same = type(module).forward(module, x, p)
    except Exception:  # Whatever it does, it is another class.
        return differs
    finally:
        module.training = was_training
    kept = mask != 0
    is_mask = torch.equal(mask, kept.to(x.dtype) / (1 - p)) and 0 < int(kept.sum()) < x.numel()
    return "" if is_mask and (mask == mask[:1]).all() and torch.equal(same, x) else differs


def weight_drop_reason(module: Any) -> str:
    """Returns why a module named WeightDrop is left as it is, "" if its layout is AWD-LSTM's."""
    differs = "its layout is not that of AWD-LSTM's WeightDrop"
    if [*module._modules] != ["module"] or module._parameters or module._buffers:
        return differs
    if not {"forward", "_setweights"} <= {*vars(type(module))}:
        return differs
    lstm, weights = module.module, getattr(module, "weights", None)
    p, variational = getattr(module, "dropout", None), getattr(module, "variational", None)
    if not isinstance(weights, (list, tuple)) or not isinstance(p, (int, float)) or not 0 <= p < 1:
        return differs
    if not isinstance(variational, bool) or not isinstance(lstm, nn.LSTM):
        return differs
    if variational:
        return "variational is not supported, whose published code also drops in eval mode"
    known = {name for names in lstm._all_weights for name in names}
    for name in weights:
        is_there = name in known and re.fullmatch(r"weight_hh_l\d+", name)
        if not is_there or name in lstm._parameters or f"{name}_raw" not in lstm._parameters:
            return differs
    if type(lstm) not in (nn.LSTM, torch_modules.LSTM) or "forward" in vars(lstm):
        return "its LSTM is not torch's"
    if lstm.bidirectional or lstm.proj_size:
        return "bidirectional and proj_size are not supported"
    missing = {*known} - {*lstm._parameters} - {*weights}
    return differs if missing else ""


# {the name of the class: (what computes it, why one is left)}
KINDS = {
    "LockedDropout": (LockedDropout, locked_dropout_reason),
    "WeightDrop": (WeightDrop, weight_drop_reason),
}
