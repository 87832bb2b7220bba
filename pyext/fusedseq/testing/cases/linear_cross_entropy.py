"""Cases of `linear_cross_entropy`."""

import math

import torch

from fusedseq.testing.cases.case import Case, dimensions, join, option_words


def linear_cross_entropy_case(N, E, V, bias=True, *, ignored=0, weighted=False, **options):
    """A case with a W (V, E).

    N: the number of rows of x, or the tuple of all dimensions of x but the last

    ignored: rows 0, ignored, 2 ignored, ... have no target; 0 for no such row, 1 for all rows
    weighted: with class weights    options: those of the operator
    """
    shape = N if isinstance(N, tuple) else (N,)

    def make(randn):
        row = torch.arange(math.prod(shape))
        target = (row.square() + row * (V // max(len(row), 1))) % V  # from all of the classes
        if ignored:
            target = torch.where(row % ignored == 0, options.get("ignore_index", -100), target)
        x, W = randn(*shape, E), E**-0.5 * randn(V, E)
        inputs = x, W, target.reshape(shape), randn(V) if bias else None
        weights = (1 + torch.arange(V) % 7) / 4  # exact in every dtype
        return inputs, options | ({"class_weights": weights} if weighted else {})

    name = join(
        dimensions(shape),
        f"E{E}",
        f"V{V}",
        "nobias" * (not bias),
        f"ignored{ignored}" * bool(ignored),
        "weighted" * weighted,
        *option_words(options),
    )
    return Case("linear_cross_entropy", name, make)


SIZES = [  # N, E, V
    (1, 1, 1),
    (3, 17, 1),
    (0, 3, 5),
    (1, 5, 1000),
    (7, 5, 33),
    (300, 33, 100),
    (20, 80, 1700),
    (8, 64, 130),
    (64, 48, 700),
]


def reduction_cases():
    for r in ("mean", "sum", "none"):
        options = {"ignored": 3, "reduction": r, "return_details": True}
        yield linear_cross_entropy_case((2, 3), 5, 9, **options)
    for r in ("mean", "none"):
        yield linear_cross_entropy_case(7, 5, 9, ignored=1, reduction=r, return_details=True)


def option_cases():
    yield linear_cross_entropy_case(9, 5, 33, label_smoothing=0.1)
    yield linear_cross_entropy_case(9, 5, 33, z_loss=0.1)
    yield linear_cross_entropy_case(9, 5, 33, temperature=0.5)
    common = {"weighted": True, "ignored": 4, "ignore_index": 3}
    loss = {"label_smoothing": 0.25, "z_loss": 0.1, "temperature": 0.75}
    for bias, r in ((True, "mean"), (False, "sum"), (True, "none")):
        results = {"reduction": r, "return_details": True}
        yield linear_cross_entropy_case(9, 5, 33, bias, **common, **loss, **results)


CASES = [
    *(linear_cross_entropy_case(*size) for size in SIZES),
    linear_cross_entropy_case((2, 3), 5, 9, bias=False),
    *reduction_cases(),
    *option_cases(),
    linear_cross_entropy_case(
        30, 20, 700, weighted=True, ignored=5, label_smoothing=0.25, z_loss=0.1, temperature=2.0
    ),
]
