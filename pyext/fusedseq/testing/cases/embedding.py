"""Cases of `embedding`."""

import math

import torch

from fusedseq.testing.cases.case import Case, dimensions


def embedding_case(shape, V, E, p=0.0, *, sparse=False):
    """A case with ids of this shape, and a W (V, E)."""

    def make(randn):
        ids = torch.arange(math.prod(shape)).square() % V  # squares, so that some words repeat
        return (ids.reshape(shape), randn(V, E)), {"p": p, "seed": 5, "sparse": sparse}

    name = f"{dimensions(shape)}-V{V}-E{E}-p{p:g}" + "-sparse" * sparse
    return Case("embedding", name, make)


CASES = [
    *(embedding_case((4, 3), 7, 5, p, sparse=s) for p in (0.0, 0.5, 1.0) for s in (False, True)),
    embedding_case((), 3, 4, 0.2),
    embedding_case((2, 3, 2), 1, 1, 0.3),
    embedding_case((0,), 7, 5, 0.5),
    embedding_case((3, 0), 7, 5, 0.5, sparse=True),
    embedding_case((35, 20), 1000, 65, 0.1),
    embedding_case((35, 20), 100, 650, 0.1, sparse=True),
]
