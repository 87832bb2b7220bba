"""Makes the benchmark cases of a linear map, and of layers with weights in 8 bits."""

import torch
from fusedseq import testing

from bench.suite import quantized_weights
from bench.suite.case import BenchmarkCase


def linear(M, K, N, **fields):
    return BenchmarkCase(
        "linear", f"{M}-{K}-{N}", testing.linear_case(M, K, N).make, flops=2.0 * M * K * N, **fields
    )


def quantized_linear(M, K, N, *targets):
    """A linear layer with weights in 8 bits, in inference."""
    return quantized_weights.QuantizedCase(
        "quantize",
        f"linear-{M}-{K}-{N}",
        lambda randn: ((randn(M, K),), {}),
        backward=False,
        flops=2.0 * M * K * N,
        targets=targets,
        full=True,
        sizes=(K, N),
    )


def quantized_lstm(T, B, X, H, *targets):
    """An LSTM with weights in 8 bits, in inference."""
    return quantized_recurrence("lstm", 4, torch.nn.LSTM, T, B, X, H, *targets)


def quantized_gru(T, B, X, H, *targets):
    """A GRU with weights in 8 bits, in inference."""
    return quantized_recurrence("gru", 3, torch.nn.GRU, T, B, X, H, *targets)


def quantized_recurrence(name, gates, module, T, B, X, H, *targets):
    return quantized_weights.QuantizedCase(
        "quantize",
        f"{name}-T{T}-B{B}-{X}-{H}",
        lambda randn: ((randn(T, B, X),), {}),
        backward=False,
        flops=2.0 * T * B * gates * H * (X + H),
        targets=targets,
        full=True,
        module=module,
        sizes=(X, H),
    )


def quantized_mogrifier_lstm(T, B, H, *targets):
    """A Mogrifier LSTM of 5 rounds with weights in 8 bits, in inference."""
    return quantized_weights.QuantizedCase(
        "quantize",
        f"mogrifier_lstm-T{T}-B{B}-{H}-r5",
        lambda randn: ((randn(T, B, H),), {}),
        backward=False,
        flops=2.0 * T * B * (8 + 5) * H * H,
        targets=targets,
        full=True,
        module=quantized_weights.mogrifier_loop,
        sizes=(H, H),
    )
