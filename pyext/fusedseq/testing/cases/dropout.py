"""Cases of `dropout`, and the constructor of cases of the three operators (x, p, seed)."""

import torch

from fusedseq.testing.cases.case import Case, dimensions, join


def dropout_case(op, shape, p, seed=5, **options):
    """A case of dropout, locked_dropout or weight_drop."""
    name = join(
        dimensions(shape) or "scalar",
        f"p{p:g}",
        *(option for option, value in options.items() if value),
        "tensor" * isinstance(seed, torch.Tensor),
        f"seed{int(seed)}" * bool(seed != 5),
    )
    return Case(op, name, lambda randn: ((randn(*shape), p, seed), options))


SHAPES = (), (1,), (3,), (2, 3, 5), (0, 5), (4, 0)

CASES = [
    *(dropout_case("dropout", shape, p) for shape in SHAPES for p in (0.0, 0.5, 1.0)),
    dropout_case("dropout", (7, 17), 0.3, torch.tensor(-9)),
    dropout_case("dropout", (7, 17), 0.3, torch.tensor([2**60])),
    dropout_case("dropout", (130, 650), 0.25, -1),
]
