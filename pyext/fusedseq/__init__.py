"""Fused operators for classic sequence models. See `fusedseq.fused`, `fusedseq.reference` and `fusedseq.nn`."""

from fusedseq import reference

__all__ = ["reference"]
