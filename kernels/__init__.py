"""Triton kernels, imported as `fusedseq.kernels`: `<op>.py` has the kernels of one operator and their launchers.

A launcher is a function with the name and the arguments of an operator that csrc/<op>.cpp declares. Triton, which an
install without a GPU need not have, is imported at the first call of one.
"""

import functools
import importlib

import torch

# operator: the module that launches it and its backward
MODULES = {
    "attention": "attention",
    "attention_backward": "attention",
    "bias_activation_dropout": "bias_activation_dropout",
    "bias_activation_dropout_backward": "bias_activation_dropout",
    "dropout_mask": "dropout_mask",
    "linear": "linear",
    "linear_backward": "linear",
    "linear_cross_entropy": "linear_cross_entropy",
    "linear_cross_entropy_backward": "linear_cross_entropy",
    "linear_cross_entropy_scale": "linear_cross_entropy",
    "residual_layer_norm": "residual_layer_norm",
    "residual_layer_norm_backward": "residual_layer_norm",
}
_registered: list[torch.library.Library] = []  # a Library unregisters what it registered when it goes


def register(key):
    """Makes the launchers the kernels of a dispatch key: CUDA, or CPU for tests under Triton's interpreter."""
    library = torch.library.Library("fusedseq", "IMPL")
    for op in MODULES:
        library.impl(op, _launcher(op), key)
    _registered.append(library)


def module(op):
    """The module that launches an operator. ImportError, in one sentence, where there is no Triton."""
    try:
        return importlib.import_module(f"fusedseq.kernels.{MODULES[op]}")
    except ModuleNotFoundError as error:
        if error.name != "triton":
            raise
        raise ImportError(f"{op}: needs Triton on a GPU, found none: pip install triton") from None


def explain(op, *args, **kwargs):
    """The kernel that a call of the public operator runs on a GPU, and why: a clause of `fused.explain`."""
    return module(op).explain(*args, **kwargs)


def _launcher(op):
    launch = functools.cache(lambda: getattr(module(op), op))

    def on_its_device(*args):
        device = args[0].get_device()
        if device < 0 or device == torch.cuda.current_device():
            return launch()(*args)
        with torch.cuda.device(device):
            return launch()(*args)

    return on_its_device
