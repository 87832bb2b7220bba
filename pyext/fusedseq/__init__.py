"""Fused operators for classic sequence models: functions in `fusedseq.fused`, their definitions in
plain PyTorch in `fusedseq.reference`, modules in `fusedseq.nn`.
"""

import importlib
from typing import TYPE_CHECKING, Any

from fusedseq import _load
from fusedseq._load import empty_cache

__version__ = "0.1.0"
MODULES = "decoding", "fused", "models", "nn", "optim", "reference"
__all__ = [*MODULES, "accelerate", "dropout_mask", "empty_cache", "quantize_"]

if TYPE_CHECKING:  # what __getattr__ imports
    from fusedseq import decoding as decoding
    from fusedseq import fused as fused
    from fusedseq import models as models
    from fusedseq import nn as nn
    from fusedseq import optim as optim
    from fusedseq import reference as reference
    from fusedseq.acceleration import accelerate as accelerate
    from fusedseq.fused.dropout_mask import dropout_mask as dropout_mask
    from fusedseq.quantization import quantize_ as quantize_

_load.require_environment()


def __dir__() -> list[str]:
    return sorted([*__all__, "__version__"])


def __getattr__(name: str) -> Any:
    # Imported at the first use, so that `fusedseq --help` needs no torch, and `fusedseq info` works
    # where the operators do not load.
    if name in MODULES:
        return importlib.import_module(f"fusedseq.{name}")
    if name == "accelerate":
        return importlib.import_module("fusedseq.acceleration").accelerate
    if name == "dropout_mask":
        return importlib.import_module("fusedseq.fused").dropout_mask
    if name == "quantize_":
        return importlib.import_module("fusedseq.quantization").quantize_
    raise AttributeError(f"module 'fusedseq' has no attribute {name!r}")
