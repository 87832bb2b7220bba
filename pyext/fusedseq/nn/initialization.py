"""Draws the parameters of modules that hold other modules."""

from collections.abc import Iterable
from typing import Any

from torch import nn


def reset_in_order(modules: Iterable[nn.Module | None]) -> None:
    """Calls `reset_parameters` of each module; of one that has none, of its children.

    modules: in the order in which a constructor draws their parameters, so that the same seed gives
        the same parameters; None is skipped
    """
    for module in modules:
        reset: Any = getattr(module, "reset_parameters", None)
        if reset is not None:
            reset()
        elif module is not None:
            reset_in_order(module.children())
