"""Optimizers that torch has no fused form of. SGD and Adam: torch's own with `fused=True`."""

from fusedseq.optim.nt_asgd import NTASGD, non_monotone, replaced

__all__ = ["NTASGD", "non_monotone", "replaced"]
