"""Cases of `dropout_mask`."""

import torch

from fusedseq.testing.cases.case import Case, dimensions


def dropout_mask_case(shape, p, seed):
    """A case with a mask of this shape."""
    name = f"{dimensions(shape) or 'scalar'}-p{p:g}-seed{int(seed)}"
    return Case("dropout_mask", name, lambda randn: ((seed, p, shape), {}))


CASES = [
    *(dropout_mask_case((3, width), 0.5, 2**32 + width) for width in (*range(10), 650)),
    *(dropout_mask_case((2, 3, 5), p, -4) for p in (0.0, 1e-9, 0.3, 1.0)),
    dropout_mask_case((7,), 0.5, torch.tensor(-(2**63))),
    dropout_mask_case((0, 5), 0.5, 1),
    dropout_mask_case((), 0.5, 1),
]
