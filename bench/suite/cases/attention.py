"""Makes the benchmark cases of attention, from packed sequences to whole encoder layers."""

from functools import partial

import torch
from fusedseq import testing

from bench.suite import baselines, encoder_layers
from bench.suite.case import BenchmarkCase, split_options


def attention(B, N, L, D, *targets, tensors=(), suffix="", **options):
    """Self-attention.

    Forward moves q, k, v and out; backward moves q, k, v, dout and three gradients. The copy that
    gives the roofline limit reads and writes four such tensors each. The operations are those of
    the keys that a query sees; lengths, which are random, are not counted.
    """
    fields, options = split_options(options)
    make = testing.attention_case(B, N, L, L, D, *tensors, **options).make
    size = B * N * L * D
    # torch's operator has neither a cap nor sinks.
    is_torchs = not options.get("softcap") and "sinks" not in tensors
    left = options.get("window", (L, 0))[0]
    keys = sum(min(i + 1, left + 1) for i in range(L)) / L if options.get("causal") else L
    return BenchmarkCase(
        "attention",
        f"L{L}-B{B}-N{N}-D{D}{suffix}",
        make,
        flops=4.0 * size * keys,
        traffic=11 * size,
        copied=(4 * B * N * L, D),
        targets=targets,
        eager=baselines.attention_eager,
        others={"torch": baselines.attention} if is_torchs else {},
        **fields,
    )


def packed_sequences(B, N, L, D, *targets, **fields):
    """Self-attention of B sequences of 1 to L tokens without padding, against the padded batch, of
    which half is padding."""
    lengths = [round(1 + (L - 1) * b / (B - 1)) for b in range(B)]
    products = 4.0 * N * D * sum(n * n for n in lengths)
    return BenchmarkCase(
        "attention_varlen",
        f"L{L}-B{B}-N{N}-D{D}",
        testing.varlen_case(lengths, lengths, N, D, spare=0).make,
        flops=products,
        traffic=11 * sum(lengths) * N * D,
        copied=(4 * sum(lengths) * N, D),
        targets=targets,
        eager=baselines.attention_varlen,
        others={"torch": baselines.attention_varlen},
        **fields,
    )


def decoding(B, N, S, D, *targets, **fields):
    """One query over S cached keys, forward only: it reads the keys and values once."""
    cached = B * N * S * D
    return BenchmarkCase(
        "attention",
        f"L1-S{S}-B{B}-N{N}-D{D}",
        testing.attention_case(B, N, 1, S, D).make,
        backward=False,
        flops=4.0 * cached,
        traffic=2 * cached,
        copied=(B * N * S, D),
        roofline="copy",
        targets=targets,
        eager=baselines.attention_eager,
        # Without the options of baselines.attention, which would take a tenth of the time.
        others={"torch": torch.nn.functional.scaled_dot_product_attention},
        **fields,
    )


def encoder_layer(B, L, E, *targets, **fields):
    """A Transformer encoder layer in training, with a feed-forward network of 4E.

    Its linear maps have 12 E^2 weights; the two products of attention are L E each per position.
    """
    return encoder_layers.EncoderLayerCase(
        "encoder_layer",
        f"B{B}-L{L}-E{E}",
        partial(encoder_layers.inputs, B, L, E),
        flops=2.0 * B * L * (12 * E * E + 2 * L * E),
        targets=targets,
        width=E,
        **fields,
    )
