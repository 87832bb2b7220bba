"""Makes the benchmark cases of the recurrent operators."""

from fusedseq import testing

from bench.suite import baselines
from bench.suite.case import BenchmarkCase, split_options


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
