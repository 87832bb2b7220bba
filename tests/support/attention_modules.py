"""Inputs of the tests of MultiheadAttention, and pairs of torch's module and this package's."""

import torch
from fusedseq import nn
from torch import nn as torch_nn

E, N, D, B = 12, 3, 4, 2
# (L, S). "self" has one tensor for query, key and value; "cross" one for key and value; "three" has
# three tensors.
INPUTS = {"self": (5, 5), "cross": (4, 6), "three": (4, 6)}


def inputs(kind, batch_first=False, kdim=E, vdim=E):
    L, S = INPUTS[kind]
    query, key, value = torch.randn(L, B, E), torch.randn(S, B, kdim), torch.randn(S, B, vdim)
    given = {
        "self": (query, query, query),
        "cross": (query, key, key),
        "three": (query, key, value),
    }[kind]
    return tuple(t.transpose(0, 1) for t in given) if batch_first else given


def pair(ops, *args, **options):
    """Returns torch's module, and ours with the same parameters."""
    theirs = torch_nn.MultiheadAttention(*args, **options)
    for p in theirs.parameters():
        torch_nn.init.normal_(p, std=0.3)
    ours = nn.MultiheadAttention(*args, ops=ops, **options)
    ours.load_state_dict(theirs.state_dict())
    return theirs, ours
