from collections.abc import Sequence

import torch
from torch import Tensor

from fusedseq.fused import autograd, check


def dropout_mask(
    seed: int | Tensor, p: float, shape: Sequence[int], device: torch.device | str | None = None
) -> Tensor:
    """Computes `fusedseq.reference.dropout_mask`: which elements a dropout keeps, as a bool tensor
    that is the same on every device.

    Errors: ValueError for p outside [0, 1] or a negative size in `shape`.
    """
    check.probability("dropout_mask", "p", p)
    check.sizes("dropout_mask", "shape", shape)
    if device is None:
        device = seed.device if isinstance(seed, Tensor) else "cpu"
    seed = check.seed("dropout_mask", seed, device)
    keep: Tensor = torch.ops.fusedseq.dropout_mask(seed, p, list(shape))
    return keep


autograd.register_fake(
    "dropout_mask", lambda named: named["seed"].new_empty(named["shape"], dtype=torch.bool)
)
