"""Cases of `split_cross_entropy`."""

import torch

from fusedseq.testing.cases.case import Case, dimensions, join


def split_cross_entropy_case(
    N, E, V, splits, bias=True, tombstone_bias=True, *, ignored=0, reduction="mean"
):
    """A case with N rows of x and a W (V, E).

    ignored: rows 0, ignored, 2 ignored, ... have no target; 0 for no such row, 1 for all rows
    """

    def make(randn):
        row, K = torch.arange(N), len(splits)
        target = row.square() % V
        target = torch.where(row % ignored == 0, -100, target) if ignored else target
        tombstones = (
            randn(K, E) if K else None,
            splits,
            randn(V) if bias else None,
            randn(K) if K and tombstone_bias else None,
        )
        return (randn(N, E), E**-0.5 * randn(V, E), target, *tombstones), {"reduction": reduction}

    name = join(
        f"{N}-E{E}-V{V}-splits{dimensions(splits)}",
        "nobias" * (not bias),
        f"ignored{ignored}" * bool(ignored),
        "notombstonebias" * (not tombstone_bias),
        reduction,
    )
    return Case("split_cross_entropy", name, make)


CASES = [
    *(
        split_cross_entropy_case(9, 5, 33, splits, reduction=r)
        for splits in ((), (4,), (4, 5, 20))
        for r in ("mean", "none")
    ),
    split_cross_entropy_case(2, 5, 33, (4, 20), ignored=1),
    split_cross_entropy_case(3, 1, 2, (1,)),
    split_cross_entropy_case(0, 5, 9, (4,), reduction="sum"),
    split_cross_entropy_case(9, 5, 33, (4, 20), bias=False, ignored=2, reduction="sum"),
    split_cross_entropy_case(9, 5, 33, (4, 20), bias=False, tombstone_bias=False),
    split_cross_entropy_case(30, 20, 700, (50, 80, 200, 600), tombstone_bias=False, ignored=5),
]
