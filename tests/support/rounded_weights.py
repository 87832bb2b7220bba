"""Models whose weights are those of Int8Weight, in floating-point numbers."""

import copy

import torch
from fusedseq.quantization import Int8Weight


def weight(N, K):
    return K**-0.5 * torch.randn(N, K)


@torch.no_grad()
def with_rounded_weights(model, quantized):
    """A copy of a model in fp32 whose weights are the rounded ones."""
    made = copy.deepcopy(model)
    for mine, rounded in zip(made.parameters(), quantized.parameters(), strict=True):
        mine.copy_(rounded.dequantize() if isinstance(rounded, Int8Weight) else rounded)
    return made
