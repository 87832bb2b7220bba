"""Cases of `residual_layer_norm`."""

import torch

from fusedseq.testing.cases.case import Case, dimensions, join, option_words


def residual_layer_norm_case(shape, *, residual=True, weight=True, bias=True, scale=1.0, **options):
    """A case with an x of this shape.

    scale: of x and residual; 0 for rows without variance    options: those of the operator
    """

    def make(randn):
        D = shape[-1]
        args = scale * randn(*shape), scale * randn(*shape) if residual else None
        return (*args, 1 + 0.1 * randn(D) if weight else None, randn(D) if bias else None), options

    name = join(
        dimensions(shape),
        "noresidual" * (not residual),
        "noweight" * (not weight),
        "nobias" * (not bias),
        f"scale{scale:g}" * (scale != 1),
        *option_words(options),
    )
    return Case("residual_layer_norm", name, make)


def dropout_cases():
    for p in (0.0, 0.4, 1.0):
        for prenorm in (False, True):
            yield residual_layer_norm_case((3, 7), p=p, prenorm=prenorm, seed=3)
    for prenorm in (False, True):
        options = {"p": 0.3, "prenorm": prenorm, "seed": -8}
        yield residual_layer_norm_case((2, 3, 5), residual=False, **options)


def size_cases():
    yield residual_layer_norm_case((5, 3, 6), p=0.5, prenorm=True, seed=2**40 + 1)
    yield residual_layer_norm_case((37, 4, 30), p=0.1, seed=torch.tensor(-4))
    yield residual_layer_norm_case((67, 650), p=0.3, prenorm=True, seed=6)
    yield residual_layer_norm_case((2, 3001), p=0.3, seed=6)
    for prenorm in (False, True):  # the Triton kernel reads such a row in chunks
        yield residual_layer_norm_case((3, 4097), p=0.3, prenorm=prenorm, seed=6)
    yield residual_layer_norm_case((5001, 3), p=0.3, seed=6)  # blocks of more than 16 rows


CASES = [
    *(residual_layer_norm_case((3, D)) for D in (1, 2, 5, 16, 17, 33)),
    *dropout_cases(),
    residual_layer_norm_case((3, 5), weight=False, bias=False, p=0.3),
    residual_layer_norm_case((3, 5), weight=False),
    residual_layer_norm_case((3, 5), bias=False, prenorm=True),
    residual_layer_norm_case((9,), p=0.2, seed=5),
    residual_layer_norm_case((0, 5), p=0.2, prenorm=True),
    residual_layer_norm_case((3, 5), scale=0.0, p=0.2, eps=0.1),
    residual_layer_norm_case((3, 5), scale=100.0, eps=0.0),
    *size_cases(),
]
