"""Makes the benchmark cases of what works element by element or row by row: dropouts, embedding,
norm, activation, activation regularization, and a step of averaged SGD.
"""

import torch
from fusedseq import fused, testing

from bench.suite import baselines, optimizers
from bench.suite.case import BenchmarkCase, OptimizerStepCase, split_options
from bench.suite.cases.word_ids import words


def elementwise(op, shape, p, *targets, passes=2, **fields):
    """A dropout: each pass reads and writes its tensor once."""
    size = torch.Size(shape).numel()
    make = testing.dropout_case(op, shape, p).make
    return BenchmarkCase(
        op,
        "x".join(map(str, shape)),
        make,
        traffic=2 * passes * size,
        copied=shape,
        roofline="copy",
        targets=targets,
        **fields,
    )


def embedding(V, *targets, backward=True, sparse=False, tokens=4900, E=650, smaller=None, **fields):
    """smaller: also time `fused` on a vocabulary of this size, as provider "V<size>"."""

    def make(randn):
        return (words(randn, tokens, V), randn(V, E), 0.1, 5, sparse), {}

    others = {"torch": baselines.embedding_rows}
    if smaller:
        others[f"V{smaller}"] = lambda ids, W, *rest: fused.embedding(
            ids % smaller, W[:smaller], *rest
        )

    # Forward gathers rows; backward reads dy and writes the rows used. The zeros in a dense
    # gradient's other rows are not counted, because the system can provide zeroed pages without
    # writing them.
    traffic = (4 if backward else 2) * tokens * E
    return BenchmarkCase(
        "embedding",
        f"{tokens}-V{V}-{E}" + "-sparse" * sparse,
        make,
        backward=backward,
        traffic=traffic,
        copied=(tokens, E),
        roofline="copy",
        targets=targets,
        others=others,
        **fields,
    )


def norm(M, D, *targets, **options):
    """Dropout, residual and LayerNorm.

    Post-norm reads x and residual and writes y; its backward reads these and dy and writes two
    gradients. Pre-norm also writes s and reads its gradient, but its backward reads neither x nor
    residual.
    """
    fields, options = split_options(options)
    make = testing.residual_layer_norm_case((M, D), p=0.1, seed=5, **options).make
    passes = 9 if options.get("prenorm") else 8
    return BenchmarkCase(
        "residual_layer_norm",
        f"{M}x{D}" + "-prenorm" * ("prenorm" in options),
        make,
        traffic=passes * M * D,
        copied=(M, D),
        roofline="copy",
        targets=targets,
        **fields,
    )


def feed_forward(M, D, activation, *targets, **fields):
    make = testing.bias_activation_dropout_case((M, D), activation, 0.1, 5).make
    return BenchmarkCase(
        "bias_activation_dropout",
        f"{M}x{D}-{activation}",
        make,
        traffic=5 * M * D,
        copied=(M, D),
        roofline="copy",
        targets=targets,
        **fields,
    )


def regularization(T, B, H, *targets):
    make = testing.activation_regularization_case(T, B, H).make
    return BenchmarkCase(
        "activation_regularization",
        f"{T}x{B}x{H}",
        make,
        traffic=6 * T * B * H,
        copied=(T * B, H),
        roofline="copy",
        targets=targets,
    )


def nt_asgd(*targets):
    """A step of averaged SGD with gradient clipping.

    The norm reads the gradients; the step reads gradient, parameter and average, and writes the
    latter two.
    """
    n = optimizers.PARAMETERS
    return OptimizerStepCase(
        "nt_asgd",
        f"{n / 1e6:.0f}M-clipped",
        optimizers.inputs,
        backward=False,
        traffic=6 * n,
        copied=(n,),
        roofline="copy",
        targets=targets,
    )
