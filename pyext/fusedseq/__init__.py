"""Fused operators for classic sequence models. See `fusedseq.fused`, `fusedseq.reference` and `fusedseq.nn`."""

import importlib

from fusedseq import _load

__version__ = "0.1.0"
__all__ = ["fused", "nn", "reference"]

_load.require_environment()


def __getattr__(name):
    # Imported where first used: `fusedseq --help` needs no torch, `fusedseq info` works where the operators don't load.
    if name in __all__:
        return importlib.import_module(f"fusedseq.{name}")
    raise AttributeError(f"module 'fusedseq' has no attribute {name!r}")
