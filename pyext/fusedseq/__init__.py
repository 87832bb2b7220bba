"""Fused operators for classic sequence models. See `fusedseq.fused`, `fusedseq.reference` and `fusedseq.nn`."""

import importlib

from fusedseq import _load
from fusedseq._load import empty_cache

__version__ = "0.1.0"
MODULES = "fused", "nn", "reference"
__all__ = [*MODULES, "empty_cache"]

_load.require_environment()


def __getattr__(name):
    # Imported where first used: `fusedseq --help` needs no torch, `fusedseq info` works where the operators don't load.
    if name in MODULES:
        return importlib.import_module(f"fusedseq.{name}")
    raise AttributeError(f"module 'fusedseq' has no attribute {name!r}")
