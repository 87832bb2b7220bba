"""Optimizers of which torch has no fused form. For SGD and Adam use torch's own, with
`fused=True`.
"""

from fusedseq.optim.nt_asgd import NTASGD, non_monotone, replaced

__all__ = ["NTASGD", "non_monotone", "replaced"]
