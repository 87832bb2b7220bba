"""Optimisers that torch has no fused form of. For SGD and Adam take torch's own with `fused=True`."""

from fusedseq.optim.nt_asgd import NTASGD, non_monotone, replaced

__all__ = ["NTASGD", "non_monotone", "replaced"]
