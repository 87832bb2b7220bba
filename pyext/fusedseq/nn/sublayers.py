"""Whether a module that computes with the parameters of a sublayer may do so without calling it."""

from typing import Any

import torch
from torch import nn


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


def is_linear(module: Any) -> bool:
    """Returns whether a call of the module is x weight^T + bias and nothing else.

    A class with a forward of its own says that with the attribute `is_linear`.
    """
    kind: Any = type(module)
    computes = kind.forward is nn.Linear.forward or getattr(kind, "is_linear", False)
    return computes and is_as_defined(module)
