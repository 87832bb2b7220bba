import torch

from fusedseq.fused import autograd, check


def dropout_mask(seed, p, shape, device=None):
    """As `fusedseq.reference.dropout_mask`: which elements a dropout keeps, a bool tensor, the same on every backend."""
    check.probability("dropout_mask", "p", p)
    if device is None:
        device = seed.device if isinstance(seed, torch.Tensor) else "cpu"
    return torch.ops.fusedseq.dropout_mask(check.seed("dropout_mask", seed, device), p, list(shape))


autograd.register("dropout_mask", lambda seed, p, shape: seed.new_empty(shape, dtype=torch.bool))
