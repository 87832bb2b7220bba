"""torch.compile of a model, where it trains."""

import torch


def compile_training(model, backend):
    """Compiles the model's forward in training mode, in place; in eval mode it stays as it is, and so do its names.

    As one graph, but where torch.nn has a recurrence in it, which torch.compile leaves as it is. What fails shows in
    the first step: see `failures`.
    """
    plain, whole = model.forward, not any(isinstance(module, torch.nn.RNNBase) for module in model.modules())
    compiled = torch.compile(plain, backend=backend, fullgraph=whole)
    model.forward = lambda *args, **kwargs: (compiled if model.training else plain)(*args, **kwargs)
