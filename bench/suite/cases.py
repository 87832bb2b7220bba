"""One function per operator makes its benchmark cases: shapes, operations and traffic.

Every function takes the sizes, then the case's targets; further keyword arguments are fields of
`BenchmarkCase` or options of the operator. `case_list.py` calls them with the sizes of the
documented models.
"""

import itertools
import math
from functools import partial

import torch
from fusedseq import fused, testing

from bench.suite import accelerated_models, baselines, encoder_layers, optimizers, quantized_weights
from bench.suite.case import BenchmarkCase, OptimizerStepCase, Target

CASE_FIELDS = ("dtype", "full", "roofline", "whole")


def split_options(options):
    """Splits keyword arguments into (fields of the case, options of the operator)."""
    fields = {name: options.pop(name) for name in CASE_FIELDS if name in options}
    return fields, options


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


def mogrifier(T, B, H, *targets, rank=None, backward=True, lengths_of_T=None, suffix="", **options):
    """lengths_of_T: call the operator on the first t steps, for each of these t in turn."""
    fields, options = split_options(options)
    make = testing.mogrifier_lstm_case(T, B, H, H, rank=rank, **options).make
    rounds = 5 * (H * H if rank is None else 2 * H * rank)
    steps = sum(lengths_of_T or [T])
    weights = rounds + 8 * H * H
    call = parts = None
    if lengths_of_T:

        def call(ops, x, *rest, **kwargs):
            return [ops.mogrifier_lstm(x[:t], *rest, **kwargs)[0] for t in lengths_of_T]

        def parts(args, kwargs):
            return [("mogrifier_lstm", (args[0][:t], *args[1:]), kwargs) for t in lengths_of_T[:2]]

    # Every step reads all weights, in forward and again in backward, which writes their gradients
    # once at the end.
    traffic = weights * (2 * T + 1 if backward else T)
    return BenchmarkCase(
        "mogrifier_lstm",
        f"T{T}-B{B}-{H}-r5{suffix}",
        make,
        call,
        parts,
        backward,
        flops=2.0 * steps * B * weights,
        traffic=traffic,
        copied=(weights // H, H),
        targets=targets,
        **fields,
    )


def mogrifier_pair(T, B, H, **fields):
    one = mogrifier(T, B, H)
    make = testing.mogrifier_lstm_pair_case(T, B, H, H, H, 5, 5).make
    return BenchmarkCase(
        "mogrifier_lstm_pair",
        f"T{T}-B{B}-{H}-r5",
        make,
        flops=2 * one.flops,
        traffic=2 * one.traffic,
        copied=one.copied,
        **fields,
    )


def lstm(T, B, X, H, *targets, dropped=0.0, packed=False, **fields):
    """packed: whether a row has several sequences, one about every 7 steps; torch has no such
    LSTM"""
    options = {"weight_drop": dropped, "seed": 5} if dropped else {}
    if packed:
        options["starts"] = [(t, b) for t in range(T) for b in range(B) if (t + 3 * b) % 7 == 0]
    suffix = f"-weight_drop{dropped:g}" * bool(dropped) + "-starts" * packed
    weights = 4 * H * (X + H)
    return BenchmarkCase(
        "lstm",
        f"T{T}-B{B}-{X}-{H}{suffix}",
        testing.lstm_case(T, B, X, H, **options).make,
        flops=2.0 * T * B * weights,
        traffic=weights * (2 * T + 1 if fields.get("backward", True) else T),
        copied=(4 * H, X + H),
        targets=targets,
        eager=baselines.lstm_loop,
        others={} if packed else {"torch": baselines.lstm},
        **fields,
    )


def gru(T, B, X, H, *targets, **fields):
    weights = 3 * H * (X + H)
    return BenchmarkCase(
        "gru",
        f"T{T}-B{B}-{X}-{H}",
        testing.hidden_state_case("gru", T, B, X, H).make,
        flops=2.0 * T * B * weights,
        traffic=weights * (2 * T + 1 if fields.get("backward", True) else T),
        copied=(3 * H, X + H),
        targets=targets,
        eager=baselines.gru_loop,
        others={"torch": baselines.gru},
        **fields,
    )


def rnn(T, B, X, H, *targets, **fields):
    """A simple RNN with tanh."""
    return BenchmarkCase(
        "rnn",
        f"T{T}-B{B}-{X}-{H}",
        testing.hidden_state_case("rnn", T, B, X, H).make,
        flops=2.0 * T * B * H * (X + H),
        targets=targets,
        eager=baselines.rnn_loop,
        others={"torch": baselines.rnn},
        **fields,
    )


def layer_norm_gru(T, B, X, H, *targets, **fields):
    return BenchmarkCase(
        "layer_norm_gru",
        f"T{T}-B{B}-{X}-{H}",
        testing.hidden_state_case("layer_norm_gru", T, B, X, H).make,
        flops=2.0 * T * B * 3 * H * (X + H),
        targets=targets,
        **fields,
    )


def bidirectional_lstm(T, B, X, H, *targets, **fields):
    return BenchmarkCase(
        "bidirectional_lstm",
        f"T{T}-B{B}-{X}-{H}",
        testing.bidirectional_lstm_case(T, B, X, H).make,
        flops=2 * 2.0 * T * B * 4 * H * (X + H),
        targets=targets,
        eager=baselines.bidirectional_lstm_loop,
        others={"torch": baselines.bidirectional_lstm},
        **fields,
    )


def projected_lstm(T, B, X, H, P, *targets, **fields):
    return BenchmarkCase(
        "projected_lstm",
        f"T{T}-B{B}-{X}-{H}-{P}",
        testing.projected_lstm_case(T, B, X, H, P=P).make,
        flops=2.0 * T * B * (4 * H * (X + P) + P * H),
        targets=targets,
        eager=baselines.projected_lstm_loop,
        others={"torch": baselines.projected_lstm},
        **fields,
    )


def lstm_with_vectors(op, T, B, X, H, *targets, **fields):
    """A peephole LSTM or an LSTM with layer normalization."""
    return BenchmarkCase(
        op,
        f"T{T}-B{B}-{X}-{H}",
        testing.lstm_with_vectors_case(op, T, B, X, H).make,
        flops=2.0 * T * B * 4 * H * (X + H),
        targets=targets,
        **fields,
    )


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


def accelerated(model, *sizes, **fields):
    """A training step of a model before and after `fusedseq.accelerate`.

    sizes: of bert and gpt2 B, L, E, heads; of transformer L, B, E, heads, layers; of lstm T, B, E,
        V; then the targets
    """
    targets = tuple(size for size in sizes if isinstance(size, Target))
    sizes = [size for size in sizes if not isinstance(size, Target)]
    if model in ("bert", "gpt2"):
        B, L, E, heads = sizes
        kind = {"bert": accelerated_models.BertBlock, "gpt2": accelerated_models.Gpt2Block}[model]
        build, shapes = partial(kind, E, heads, L), [(B, L, E)]
        flops = 2.0 * B * L * (12 * E * E + 2 * L * E)
    elif model == "transformer":
        L, B, E, heads, layers = sizes
        build = partial(accelerated_models.Translator, E, heads, layers)
        shapes = [(L, B, E)] * 2
        # A decoder layer has four more square maps, and a second attention.
        flops = 2.0 * B * L * layers * (28 * E * E + 6 * L * E)
    else:
        T, B, E, V = sizes
        build, shapes = partial(accelerated_models.LanguageModel, V, E), []
        flops = 2.0 * T * B * (2 * 8 * E * E + E * V)

    def make(randn):
        if shapes:
            return tuple(randn(*shape) for shape in shapes)
        return (words(randn, (T + 1) * B, V).view(T + 1, B),)

    return accelerated_models.AcceleratedModelCase(
        "accelerate",
        f"{model}-{'-'.join(map(str, sizes))}",
        partial(accelerated_models.inputs, build, make),
        flops=flops,
        targets=targets,
        build=build,
        **fields,
    )


def words(randn, tokens, V):
    """Returns word ids as frequent as words in text (Zipf's law: ranks are log-uniform)."""
    u = 0.5 + 0.5 * torch.erf(randn(tokens) / 2**0.5)
    return (V**u).long().clamp(max=V) - 1


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
