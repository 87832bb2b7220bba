"""Triton kernels, imported as `fusedseq.kernels`. Each operator has a module or package with its
kernels and launchers.

A launcher is a function with the name and the arguments of an operator that csrc/ops declares.
Triton is imported at the first call of a launcher, since an installation without a GPU may lack it.
"""

import functools
import importlib
import warnings
from typing import Any

import torch

# operator: the module that launches it
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
# Measured tiles of attention's tiled kernels, which fusedseq.kernel_table fills: {(width of heads,
# register pressure, kernel): (BM, BN, BD, warps, stages)}, of the forward kernel also its loads;
# and the GPU that they hold for, or "" for any. Kernels: TILED_KERNELS in kernels/attention/plan.py
tiles: dict[tuple[int, int, str], tuple[int, ...]] = {}
tiles_of_gpu = ""
# A Library that is garbage-collected unregisters its kernels.
_registered: list[torch.library.Library] = []


def register(key: str) -> None:
    """Registers the launchers as the operators' kernels for a dispatch key.

    key: "CUDA", or "CPU" for tests in Triton's interpreter
    """
    library = torch.library.Library("fusedseq", "IMPL")
    for op in MODULES:
        library.impl(op, _launcher(op), key)
    _registered.append(library)


def module(op: str) -> Any:
    """Returns the module that launches an operator.    Errors: ImportError without Triton"""
    try:
        return importlib.import_module(f"fusedseq.kernels.{MODULES[op]}")
    except ModuleNotFoundError as error:
        if error.name != "triton":
            raise
        raise ImportError(f"{op}: needs Triton on a GPU, found none: pip install triton") from None


def explain(op: str, *args: Any, **kwargs: Any) -> str:
    """Returns which kernel a call of the public operator runs on a GPU, and why, for
    `fused.explain`."""
    return str(module(op).explain(*args, **kwargs))


def tiles_of_current_gpu() -> dict[tuple[int, int, str], tuple[int, ...]]:
    """Returns the measured tiles, or none if the current GPU is not the one of the table, of which
    this warns once."""
    if not tiles or not tiles_of_gpu or not torch.cuda.is_available():
        return tiles
    return tiles if _is_gpu(torch.cuda.current_device(), tiles_of_gpu) else {}


@functools.cache
def _is_gpu(device: int, gpu: str) -> bool:
    """Returns whether a device is the GPU of a table, and warns if it is not."""
    facts: Any = torch.cuda.get_device_properties(device)
    found = f"{facts.name} ({facts.major}.{facts.minor}, {facts.multi_processor_count} "
    if gpu.startswith(found):
        return True
    warnings.warn(
        f"fusedseq: the kernel table in FUSEDSEQ_KERNEL_TABLE is of {gpu}, this GPU is "
        f"{found}multiprocessors): its tiles are not used",
        RuntimeWarning,
        stacklevel=2,
    )
    return False


def _launcher(op: str) -> Any:
    @functools.cache
    def launch() -> Any:
        return getattr(module(op), op)

    def on_its_device(*args):
        """Calls the launcher with the device of its first tensor as the current one."""
        device = next(x for x in args if isinstance(x, torch.Tensor)).get_device()
        if device < 0 or device == torch.cuda.current_device():
            return launch()(*args)
        with torch.cuda.device(device):
            return launch()(*args)

    return on_its_device
