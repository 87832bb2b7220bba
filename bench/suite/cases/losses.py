"""Makes the benchmark cases of the output layer with its loss."""

import itertools
import math

import torch
from fusedseq import testing

from bench.suite import baselines
from bench.suite.case import BenchmarkCase
from bench.suite.cases.word_ids import words


def cross_entropy(N, E, V, *targets, bias=False, **fields):
    """The output layer with its loss.

    torch's own operator runs with the fastest of some chunk sizes; the full set also has its
    default chunk size, which may be many times slower.
    """
    make = testing.linear_cross_entropy_case(N, E, V, bias).make
    has_torch_operator = hasattr(torch.nn.functional, "linear_cross_entropy")  # since torch 2.13
    return BenchmarkCase(
        "linear_cross_entropy",
        f"{N}-{E}-{V}",
        make,
        flops=2.0 * N * E * V,
        targets=targets,
        others={"torch": baselines.FastestChunk()} if has_torch_operator else {},
        slow={"torch default": baselines.linear_cross_entropy_chunked}
        if has_torch_operator
        else {},
        **fields,
    )


def split_cross_entropy(N, E, V, splits, *targets, **fields):
    """Targets are as frequent as words in text, so that every tail gets a realistic share."""

    def make(randn):
        (x, W, _, *rest), kwargs = testing.split_cross_entropy_case(N, E, V, splits).make(randn)
        return (x, W, words(randn, N, V), *rest), kwargs

    edges = (*splits, V)
    tails = sum(
        (end - start) * math.log(end / start, V) for start, end in itertools.pairwise(edges)
    )
    flops = 2.0 * N * E * (splits[0] + len(splits) + tails)
    return BenchmarkCase(
        "split_cross_entropy", f"{N}-{E}-{V}", make, flops=flops, targets=targets, **fields
    )
