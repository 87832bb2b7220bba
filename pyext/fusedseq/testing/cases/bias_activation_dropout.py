"""Cases of `bias_activation_dropout`."""

import torch

from fusedseq.testing.cases.case import Case, dimensions

ACTIVATIONS = "relu", "gelu", "gelu_tanh", "tanh"


def bias_activation_dropout_case(shape, activation, p=0.0, seed=7, *, bias=True):
    """A case with an x of this shape, whose last dimension is that of the bias, if there is one."""

    def make(randn):
        return (randn(*shape), randn(shape[-1]) if bias else None, activation, p, seed), {}

    name = f"{dimensions(shape)}-{activation}-p{p:g}" + "-nobias" * (not bias)
    return Case("bias_activation_dropout", name, make)


CASES = [
    *(bias_activation_dropout_case((2, 3, 5), a, p) for a in ACTIVATIONS for p in (0.0, 0.4)),
    *(bias_activation_dropout_case((D,), "gelu", 0.2) for D in (1, 16, 17)),
    bias_activation_dropout_case((3, 7), "relu", 1.0),
    bias_activation_dropout_case((3, 7), "relu", 0.3, torch.tensor(-5), bias=False),
    bias_activation_dropout_case((3, 7), "gelu", 0.3, bias=False),
    bias_activation_dropout_case((0, 5), "gelu", 0.3),
    bias_activation_dropout_case((4, 0), "relu", 0.3),
    *(bias_activation_dropout_case((130, 257), a, 0.1, 2**50) for a in ACTIVATIONS),
    bias_activation_dropout_case((5001, 3), "gelu", 0.1, -1),
]
