"""What is timed on a GPU: rows as in cases.py, in bf16, with the bars of the H200 and what each is compared with there.

Bars on time beside a peer or a bound, which gpu_figures.py judges: see `Bar`. A bar without a result is "not measured".
"""

from dataclasses import dataclass, field, replace

import torch
from fusedseq import nn, testing
from torch.func import functional_call

from bench import cases, peers
from bench.cases import Row

BF16 = torch.bfloat16
REHEARSED = 12  # the largest size of anything in a rehearsal


@dataclass(frozen=True)
class Bar:
    """against: a provider, or "best of A, B": `fused` is at least `figure` times as fast as it (as the fastest that ran);
    "us per step", "us": it takes no longer; "copy": that part of the copy bandwidth, or more"""

    against: str
    figure: float
    way: str = "graph"  # of gpu_timing.WAYS


@dataclass(frozen=True)
class Case:
    row: Row
    group: str  # rows of a group share a process
    bars: tuple = ()
    peers: dict = field(default_factory=dict)
    steps: int = 0  # of a recurrence
    exchanges: int = 0  # of activations between SMs, in a step's forward; as many in its backward
    name: str = ""

    def providers(self):
        return {**self.row.providers(full=False), **self.peers}


def recurrence(row, *bars, exchanges, steps, **more):
    return Case(row, "recurrent", bars, steps=steps, exchanges=exchanges, **more)


def modelled(low, high):
    """1.5 times persistent.md §6's microseconds a step: its forward, at the middle, with a backward of 1.5 times as much."""
    return Bar("us per step", 1.5 * 2.5 * (low + high) / 2)


def mogrifier(T, B, H, *bars, dtype=BF16, **options):
    row = cases.mogrifier(T, B, H, dtype=dtype, **options)
    return recurrence(row, *bars, exchanges=6, steps=T)


def mogrifier_layers(T, B, H, layers, *bars):
    """The module of so many layers, which may run as a wavefront, against one module a layer."""
    whole, alone = (nn.MogrifierLSTM(H, H, n, device="meta") for n in (layers, 1))  # the weights come as arguments
    names, of_one = list(whole.state_dict()), list(alone.state_dict())

    def make(randn):
        x, *_ = testing.mogrifier_lstm_case(T, B, H, H).make(randn)[0]
        return (x, *(H**-0.5 * randn(*p.shape) for p in whole.state_dict().values())), {}

    def call(ops, x, *weights):
        module = nn.MogrifierLSTM(H, H, layers, device="meta", ops=ops)
        return functional_call(module, dict(zip(names, weights, strict=True)), (x,))

    def in_sequence(x, *weights):
        given = dict(zip(names, weights, strict=True))
        for l in range(layers):
            mine = {name: given[of_layer(name, l)] for name in of_one}
            x, _ = functional_call(alone, mine, (x,))
        return x

    row = cases.mogrifier(T, B, H, dtype=BF16)
    row = replace(row, id=f"{row.id}-{layers}layers", make=make, call=call, parts=lambda args, kwargs: [],
                  flops=layers * row.flops, traffic=layers * row.traffic, others={"in sequence": in_sequence})  # fmt: skip
    return recurrence(row, *bars, exchanges=6 * ((layers + 1) // 2), steps=T)


def of_layer(name, l):
    """The parameter of layer l that is called `name` in the first."""
    return name.replace("0", str(l), 1)


def dropped_lstm(T, B, X, H, *bars):
    """W_hh masked; "torch" is cuDNN on the weight that F.dropout gives, which it packs in each call."""
    row = cases.lstm(T, B, X, H, dropped=0.5, dtype=BF16)
    return recurrence(row, *bars, exchanges=1, steps=T, peers={"cudnn unmasked": peers.PackedLSTM()})


def copied(row, *bars, **more):
    """A row whose time is that of moving its bytes: judged with nothing of them in the L2."""
    return Case(replace(row, bars=()), "memory", tuple(replace(bar, way="cold") for bar in bars), **more)


def embedding(tokens, V, E, *bars, backward):
    """A dense gradient: every row of it is written, of words that did not occur as well."""
    row = cases.embedding(V, tokens=tokens, E=E, backward=backward, dtype=BF16)
    return copied(replace(row, traffic=(3 * tokens + V) * E if backward else 2 * tokens * E), *bars)


def attention(B, N, L, D, *bars, backward=True, long=False, **options):
    """Traffic of q, k, v and out forward; with q, k, v, dout and three gradients backward."""
    row = cases.attention(B, N, L, D, dtype=BF16, **options)
    if not backward:
        row = replace(row, backward=False, traffic=4 * B * N * L * D)
    if options.get("causal"):
        row = replace(row, flops=row.flops / 2)
    if long:  # the oracle's fp64 has L x L of it in memory, many times over
        row = replace(row, parts=lambda args, kwargs: [("attention", [t[:1, :2] for t in args], kwargs)])
    return Case(row, "attention-long" if long else "attention", bars, peers=peers.attention())


def best(figure, *also):
    return Bar("best of " + ", ".join([*peers.attention(), "eager", "compiled", *also]), figure)


def cross_entropy(N, E, V, *bars, **options):
    return Case(cases.cross_entropy(N, E, V, dtype=BF16, **options), "losses", bars)


def norm(M, D, *bars):
    return copied(cases.norm(M, D, dtype=BF16), *bars)


def built(most):
    """All cases with no size above `most`."""

    def n(size):
        return min(size, most)

    padded = {"tensors": ("lengths",), "seed": 5}
    return [
        # Issue 4: the recurrent family.
        mogrifier(n(70), n(20), n(650), Bar("eager", 25, "call"), Bar("compiled", 8, "call"), Bar("us per step", 25)),
        mogrifier(n(70), n(80), n(650), Bar("eager", 15, "call"), modelled(12, 18)),  # in two groups of SMs
        mogrifier(n(70), n(20), n(1150), Bar("eager", 15, "call"), modelled(12, 18)),
        mogrifier(n(70), n(64), n(912), Bar("eager", 15, "call"), modelled(17, 27), rank=n(84), suffix="-rank84"),
        mogrifier(n(70), n(20), n(650), dtype=torch.float32),
        mogrifier_layers(n(70), n(20), n(650), 3, Bar("in sequence", 1.6)),
        dropped_lstm(n(70), n(20), n(650), n(650), Bar("torch", 2)),
        dropped_lstm(n(70), n(20), n(1150), n(1150), Bar("torch", 2)),
        *(copied(cases.elementwise(op, shape, 0.5, dtype=BF16), Bar("copy", 0.85))
          for op, shape in (("locked_dropout", (n(70), n(704), n(650))), ("weight_drop", (n(8192), n(4096))))),
        *(embedding(n(50_000), n(100_000), n(650), Bar("copy", 0.85), backward=b) for b in (False, True)),
        # Issue 7: attention and the output layer.
        attention(n(2048), n(8), n(6), n(32), Bar("us", 2 * 5.9, "cold"), best(5), backward=False),
        attention(n(2048), n(8), n(6), n(32), Bar("us", 2 * (5.9 + 10.2), "cold"), best(5)),
        attention(n(64), n(8), n(90), n(64), best(2), causal=True, dropout=0.1, suffix="-lengths-causal-dropout.1", **padded),
        *(attention(n(64), n(N), n(90), n(D), best(3), dropout=0.3, suffix="-lengths-dropout.3", **padded)
          for N, D in ((10, 10), (5, 20), (10, 30), (5, 60))),
        *(attention(n(B), n(16), n(L), n(D), Bar("sdpa flash", 0.9), causal=True, backward=b, suffix="-causal", long=True)
          for B, L in ((8, 2048), (2, 8192)) for D in (64, 128) for b in (False, True)),
        cross_entropy(n(2048), n(256), n(100_000), Bar("us", 1.6 * 320), Bar("eager", 2)),
        cross_entropy(n(4900), n(650), n(10_000), Bar("us", 1.6 * 190), Bar("eager", 2), bias=True),
        norm(n(65_536), n(512), Bar("copy", 0.8)),
    ]  # fmt: skip


def listed(rehearsal=False):
    """The cases; in a rehearsal small ones, under the names of the real."""
    real = [replace(case, name=case.row.name) for case in built(1 << 30)]
    if not rehearsal:
        return real
    return [replace(small, name=case.name) for small, case in zip(built(REHEARSED), real, strict=True)]


GROUPS = ("recurrent", "memory", "attention", "losses", "attention-long")  # in order of worth
