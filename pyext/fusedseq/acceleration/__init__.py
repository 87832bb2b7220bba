"""Makes the fused operators compute an existing model of torch, in place."""

from fusedseq.acceleration.replace import accelerate
from fusedseq.acceleration.report import Entry, Report

__all__ = ["Entry", "Report", "accelerate"]
