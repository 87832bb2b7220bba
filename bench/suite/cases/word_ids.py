"""Draws word ids, which are the input of the benchmark cases with a vocabulary."""

import torch


def words(randn, tokens, V):
    """Returns word ids as frequent as words in text (Zipf's law: ranks are log-uniform)."""
    u = 0.5 + 0.5 * torch.erf(randn(tokens) / 2**0.5)
    return (V**u).long().clamp(max=V) - 1
