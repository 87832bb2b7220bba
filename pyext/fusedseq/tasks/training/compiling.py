"""torch.compile for the model's training forward pass."""

from collections.abc import Callable
from typing import Any

import torch


def compile_training(model: torch.nn.Module, backend: str | Callable) -> None:
    """Compiles the model's forward in training mode, in place.

    In eval mode the forward stays uncompiled. Parameter names do not change. The model is compiled
    as one graph. A failing compilation raises in the first step: see `failures`.
    backend: a backend of torch.compile, by name or as a function
    """
    plain = model.forward
    compiled = torch.compile(plain, backend=backend, fullgraph=True)

    def forward(*args: Any, **kwargs: Any) -> Any:
        return (compiled if model.training else plain)(*args, **kwargs)

    model.forward = forward
