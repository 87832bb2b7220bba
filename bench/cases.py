"""What is timed: the shapes of the documented models, each with the bars it has to pass."""

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial

import torch
from fusedseq import fused, testing

from bench import baselines, compiled, optimizers


@dataclass(frozen=True)
class Bar:
    """`fused` must be at least `figure` times as fast as provider `against`, or reach that part of its row's roof, or take
    at most that part of a provider's memory."""

    against: str  # a provider (eager, torch, ...), "roof", or "memory of PROVIDER"
    figure: float


@dataclass(frozen=True)
class Row:
    """One line of the table: a call, timed with or without its backward."""

    op: str
    id: str
    make: Callable  # randn -> (args, kwargs), as in testing.Case
    call: Callable | None = None  # (ops, *args, **kwargs); by default ops.<op>
    parts: Callable | None = None  # (args, kwargs) -> [(op, args, kwargs)] to check; by default the call itself
    backward: bool = True
    dtype: torch.dtype = torch.float32
    flops: float = 0.0  # of the forward; the backward has twice as many
    traffic: float = 0.0  # least number of elements read and written, over all that is timed
    copied: tuple = ()  # the shape whose copy (or product with a vector) is the roof for `traffic`
    roof: str = "gemm"  # gemm: flops against the machine's GEMM rate; copy, mv: traffic against torch's copy_, mv
    bars: tuple = ()
    eager: Callable | None = None  # instead of the function in baselines
    others: dict = field(default_factory=dict)  # more providers; "torch" is torch's own way, where `eager` is not it
    slow: dict = field(default_factory=dict)  # more providers, in the full set only
    whole: bool = False  # in the full set, also compile the loop as a whole
    full: bool = False  # only in the full set

    @property
    def mode(self):
        return "forward+backward" if self.backward else "forward"

    @property
    def name(self):
        words = [self.op, self.id, "" if self.backward else "forward"]
        return "-".join(w for w in [*words, "" if self.dtype == torch.float32 else str(self.dtype)[6:]] if w)

    def in_dtype(self, dtype):
        """The same row in another dtype; bars are set for float32 alone."""
        return (
            self
            if dtype == self.dtype
            else replace(self, dtype=dtype, bars=self.bars if dtype == torch.float32 else ())
        )

    def inputs(self, device):
        return testing.Case(self.op, self.id, self.make).inputs(device, self.dtype)

    def run(self, ops):
        """The row's call with the functions of `ops`."""
        if self.call is None:
            return getattr(ops, self.op)
        return lambda *args, **kwargs: self.call(ops, *args, **kwargs)

    def providers(self, full):
        """{name: function}, `fused` and all it is compared with; for "compiled" see bench/compiled.py."""
        eager = self.eager or self.run(baselines)
        slow = self.slow if full else {}
        found = {"fused": self.run(fused), "eager": eager, **self.others, **slow, "compiled": self.run(compiled)}
        if self.whole and full:
            found["compiled whole"] = compiled.whole(eager)
        return found


class StepRow(Row):
    """A step of an optimiser, which is no operator: bench/optimizers.py has its providers."""

    mode = "step"

    @property
    def name(self):
        return f"{self.op}-{self.id}"

    def providers(self, full):
        loop, foreach = (partial(optimizers.torch_asgd, foreach=foreach) for foreach in (False, True))
        named = {"fused": optimizers.nt_asgd, "eager": loop, "torch": foreach}
        return {name: optimizers.kept(build) for name, build in named.items()}


def nt_asgd(*bars):
    """The norm reads the gradients; the step reads gradient, parameter and average, and writes the latter two."""
    n = optimizers.PARAMETERS
    return StepRow("nt_asgd", f"{n / 1e6:.0f}M-clipped", optimizers.inputs, backward=False, traffic=6 * n, copied=(n,),
                   roof="copy", bars=bars)  # fmt: skip


def mogrifier(T, B, H, *bars, rank=None, backward=True, lengths_of_T=None, suffix="", **options):
    """lengths_of_T: run the sequence's first t steps for each of these t, one after the other."""
    row = {k: options.pop(k) for k in ("dtype", "full", "roof", "whole") if k in options}
    case = testing.mogrifier_lstm_case(T, B, H, H, rank=rank, **options)
    rounds = 5 * (H * H if rank is None else 2 * H * rank)
    steps = sum(lengths_of_T or [T])
    weights = rounds + 8 * H * H
    call = parts = None
    if lengths_of_T:

        def call(ops, x, *rest, **kwargs):
            return [ops.mogrifier_lstm(x[:t], *rest, **kwargs)[0] for t in lengths_of_T]

        def parts(args, kwargs):
            return [("mogrifier_lstm", (args[0][:t], *args[1:]), kwargs) for t in lengths_of_T[:2]]

    # One step reads every weight forward; backward reads them again, and writes their gradients once, at the end.
    traffic = weights * (2 * T + 1 if backward else T)
    return Row(
        "mogrifier_lstm", f"T{T}-B{B}-{H}-r5{suffix}", case.make, call, parts, backward, flops=2.0 * steps * B * weights,
        traffic=traffic, copied=(weights // H, H), bars=bars, **row,
    )  # fmt: skip


def mogrifier_pair(T, B, H, **row):
    of_one, make = mogrifier(T, B, H), testing.mogrifier_lstm_pair_case(T, B, H, H, H, 5, 5).make
    return Row("mogrifier_lstm_pair", f"T{T}-B{B}-{H}-r5", make, flops=2 * of_one.flops, traffic=2 * of_one.traffic,
               copied=of_one.copied, **row)  # fmt: skip


def lstm(T, B, X, H, *bars, dropped=0.0, **row):
    options, suffix = ({"weight_drop": dropped, "seed": 5}, f"-weight_drop{dropped:g}") if dropped else ({}, "")
    return Row("lstm", f"T{T}-B{B}-{X}-{H}{suffix}", testing.lstm_case(T, B, X, H, **options).make,
               flops=2.0 * T * B * 4 * H * (X + H), bars=bars, eager=baselines.lstm_loop, others={"torch": baselines.lstm},
               **row)  # fmt: skip


def elementwise(op, shape, p, *bars, passes=2, **row):
    """A dropout: each pass reads and writes its tensor once."""
    size = torch.Size(shape).numel()
    make = testing.dropout_case(op, shape, p).make
    return Row(
        op, "x".join(map(str, shape)), make, traffic=2 * passes * size, copied=shape, roof="copy", bars=bars, **row
    )


def attention(B, N, L, D, *bars, tensors=(), suffix="", **options):
    """Self-attention: traffic of q, k, v and out forward, of q, k, v, dout and the three gradients backward; beside a copy
    as large as these eight tensors."""
    row = {name: options.pop(name) for name in ("dtype", "full", "roof") if name in options}
    case = testing.attention_case(B, N, L, L, D, *tensors, **options)
    size = B * N * L * D
    return Row("attention", f"L{L}-B{B}-N{N}-D{D}{suffix}", case.make, flops=4.0 * size * L, traffic=11 * size,
               copied=(4 * B * N * L, D), bars=bars, eager=baselines.attention_eager, others={"torch": baselines.attention},
               **row)  # fmt: skip


def words(randn, tokens, V):
    """Word ids as frequent as in text (Zipf: log-uniform ranks)."""
    u = 0.5 + 0.5 * torch.erf(randn(tokens) / 2**0.5)
    return (V**u).long().clamp(max=V) - 1


def embedding(V, *bars, backward=True, sparse=False, tokens=4900, E=650, smaller=None, **row):
    """smaller: also time `fused` on a vocabulary of that size, as provider "V<size>"."""

    def make(randn):
        return (words(randn, tokens, V), randn(V, E), 0.1, 5, sparse), {}

    others = {"torch": baselines.embedding_rows}
    if smaller:
        others[f"V{smaller}"] = lambda ids, W, *rest: fused.embedding(ids % smaller, W[:smaller], *rest)

    # Forward: gather. Backward: read dy, write the rows used. The rest of a dense gradient's zeros is not counted, as the
    # system can give them for nothing.
    traffic = (4 if backward else 2) * tokens * E
    return Row("embedding", f"{tokens}-V{V}-{E}" + "-sparse" * sparse, make, backward=backward, traffic=traffic,
               copied=(tokens, E), roof="copy", bars=bars, others=others, **row)  # fmt: skip


def linear(M, K, N, **row):
    return Row("linear", f"{M}-{K}-{N}", testing.linear_case(M, K, N).make, flops=2.0 * M * K * N, **row)


def norm(M, D, *bars, **options):
    """Post-norm reads x, residual and writes y; its backward reads these and dy and writes two gradients. Prenorm also
    writes s and reads its gradient, but not x and residual."""
    row = {k: options.pop(k) for k in ("dtype", "full") if k in options}
    case = testing.residual_layer_norm_case((M, D), p=0.1, seed=5, **options)
    passes = 9 if options.get("prenorm") else 8
    return Row("residual_layer_norm", f"{M}x{D}" + "-prenorm" * ("prenorm" in options), case.make, traffic=passes * M * D,
               copied=(M, D), roof="copy", bars=bars, **row)  # fmt: skip


def feed_forward(M, D, activation, *bars, **row):
    case = testing.bias_activation_dropout_case((M, D), activation, 0.1, 5)
    return Row("bias_activation_dropout", f"{M}x{D}-{activation}", case.make, traffic=5 * M * D, copied=(M, D), roof="copy",
               bars=bars, **row)  # fmt: skip


def cross_entropy(N, E, V, *bars, bias=False, **row):
    """torch's own with the fastest of its chunks; with its default, which may be many times slower, in the full set."""
    make = testing.linear_cross_entropy_case(N, E, V, bias).make
    own = hasattr(torch.nn.functional, "linear_cross_entropy")  # torch 2.13
    return Row("linear_cross_entropy", f"{N}-{E}-{V}", make, flops=2.0 * N * E * V, bars=bars,
               others={"torch": baselines.BestChunk()} if own else {},
               slow={"torch default": baselines.linear_cross_entropy_chunked} if own else {}, **row)  # fmt: skip


def split_cross_entropy(N, E, V, splits, *bars, **row):
    """Words as frequent as in text, so that a tail has its share of the rows."""

    def make(randn):
        (x, W, _, *rest), kwargs = testing.split_cross_entropy_case(N, E, V, splits).make(randn)
        return (x, W, words(randn, N, V), *rest), kwargs

    edges = (*splits, V)
    tails = sum((end - start) * math.log(end / start, V) for start, end in itertools.pairwise(edges))
    flops = 2.0 * N * E * (splits[0] + len(splits) + tails)
    return Row("split_cross_entropy", f"{N}-{E}-{V}", make, flops=flops, bars=bars, **row)


def regularization(T, B, H, *bars):
    make = testing.activation_regularization_case(T, B, H).make
    return Row(
        "activation_regularization",
        f"{T}x{B}x{H}",
        make,
        traffic=6 * T * B * H,
        copied=(T * B, H),
        roof="copy",
        bars=bars,
    )


ROWS = [
    mogrifier(70, 70, 650, Bar("eager", 2.0), Bar("roof", 0.8)),
    mogrifier(35, 20, 650, Bar("eager", 3.3), whole=True),
    mogrifier(70, 20, 1150, Bar("eager", 2.8)),
    mogrifier(70, 1, 650, Bar("eager", 3.3), roof="mv", whole=True),
    mogrifier(70, 1, 650, Bar("eager", 1.4), backward=False, roof="mv"),
    lstm(70, 20, 650, 650, Bar("torch", 1.0)),
    lstm(70, 20, 650, 650, Bar("torch", 1.15), dropped=0.5),
    lstm(70, 20, 400, 1150, Bar("torch", 1.0)),
    lstm(70, 20, 400, 1150, Bar("torch", 1.15), dropped=0.5),
    elementwise("dropout", (4900, 650), 0.5, Bar("eager", 5.0), Bar("roof", 0.7)),
    elementwise("locked_dropout", (70, 70, 650), 0.5, Bar("roof", 0.7)),
    elementwise("weight_drop", (2600, 650), 0.5, Bar("eager", 8.0)),
    embedding(10_000, Bar("eager", 4.0)),
    embedding(100_000, Bar("eager", 4.0)),
    embedding(10_000, backward=False),
    embedding(100_000, Bar("V10000", 0.8), backward=False, smaller=10_000),  # forward time independent of V
    regularization(70, 70, 650, Bar("eager", 3.0)),
    linear(1400, 400, 10_000),
    # en-es: the sentence pairs of two to six words; reversal; en-fr.
    attention(2048, 8, 6, 32, Bar("torch", 5.0), Bar("eager", 12.0), Bar("roof", 0.4), roof="copy"),
    attention(2048, 8, 6, 32, Bar("torch", 10.0), tensors=("lengths",), suffix="-lengths-dropout.1", dropout=0.1, seed=5,
              roof="copy"),
    *(attention(8, 1, 5, D, Bar("torch", 3.0 if D <= 256 else 2.0), roof="copy") for D in (32, 256, 512, 2048)),
    attention(64, 8, 90, 64, Bar("torch", 2.0), tensors=("lengths",), suffix="-lengths-causal-dropout.1", causal=True,
              dropout=0.1, seed=5),
    attention(64, 8, 90, 64, Bar("torch", 1.0), suffix="-causal", causal=True),
    *(attention(64, N, 90, D, Bar("torch", 2.0), Bar("eager", 2.0), tensors=("lengths", *positions),
                suffix=f"-lengths-dropout.3{''.join('-' + p for p in positions)}", dropout=0.3, seed=5)
      for N, D, *positions in ((5, 20), (10, 10), (5, 60, "rope"), (10, 30, "alibi"), (5, 20, "relative16"),
                               (10, 10, "biasNLS"))),
    attention(2, 8, 1024, 64, suffix="-causal", causal=True),
    nt_asgd(Bar("eager", 3.0), Bar("torch", 3.0)),
    norm(2048 * 6, 256, Bar("eager", 3.0)),
    norm(64 * 90, 512, Bar("eager", 3.0)),
    norm(64 * 90, 512, prenorm=True),
    feed_forward(64 * 90, 2048, "relu", Bar("eager", 3.0)),
    feed_forward(64 * 90, 2048, "gelu", Bar("eager", 3.0)),
    cross_entropy(2048, 256, 100_000, Bar("eager", 1.55), Bar("torch", 1.05), Bar("memory of eager", 0.15)),
    cross_entropy(4900, 650, 10_000, Bar("eager", 1.2), Bar("torch", 1.03), Bar("memory of eager", 0.25), bias=True),
    split_cross_entropy(1400, 400, 100_000, (2800, 20_000, 76_000), Bar("eager", 1.0)),  # the AWD-LSTM code's splits
    # Only in the full set: the paper's model, its dropouts, lengths that vary, bf16, sparse gradients.
    mogrifier(70, 64, 912, rank=84, suffix="-rank84", full=True),
    mogrifier(70, 64, 912, rank=84, suffix="-rank84-paper", full=True, input_dropout=0.729, state_dropout=0.387,
              cap_input_gate=True, seed=5),
    mogrifier(70, 20, 650, suffix="-zoneout.1-state_dropout.3", full=True, zoneout_h=0.1, zoneout_c=0.1,
              state_dropout=0.3, seed=5),
    mogrifier(75, 20, 650, suffix="-varied", full=True, lengths_of_T=(70, 35, 68, 73, 64, 75)),
    mogrifier_pair(35, 20, 650, full=True),
    embedding(100_000, sparse=True, full=True),
    mogrifier(70, 70, 650, dtype=torch.bfloat16, full=True),
    lstm(70, 20, 650, 650, dtype=torch.bfloat16, full=True),
    lstm(70, 20, 400, 1150, dropped=0.5, dtype=torch.bfloat16, full=True),
    elementwise("dropout", (4900, 650), 0.5, dtype=torch.bfloat16, full=True),
    norm(64 * 90, 512, dtype=torch.bfloat16, full=True),
    feed_forward(64 * 90, 2048, "relu", dtype=torch.bfloat16, full=True),
    cross_entropy(2048, 256, 100_000, backward=False, full=True),
    cross_entropy(4900, 650, 10_000, bias=True, dtype=torch.bfloat16, full=True),
]  # fmt: skip
