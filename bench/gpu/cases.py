"""The benchmark cases of a GPU: the suite's in bf16, with targets for an H200 and GPU peers.

A target compares times with a peer's or with a bound; bench/gpu/report.py judges it. Without a
result a target is "not measured".
"""

from dataclasses import dataclass, field, replace

import torch
from fusedseq import nn, testing
from torch.func import functional_call

from bench.gpu import peers
from bench.suite.case import BenchmarkCase
from bench.suite.cases import attention as attention_cases
from bench.suite.cases import elementwise, losses
from bench.suite.cases import recurrence as recurrence_cases

BF16 = torch.bfloat16
REHEARSAL_SIZE = 12  # no dimension is larger in a rehearsal on a CPU


@dataclass(frozen=True)
class Target:
    """A time that the fused operator has to reach on an H200.

    against: a provider, or "best of A, B": `fused` is at least `value` times as fast as it, or as
        the fastest of them that ran; "us per step", "us": `fused` takes at most `value`
        microseconds; "copy": `fused` reaches at least the fraction `value` of the copy bandwidth
    way: one of timing.WAYS
    """

    against: str
    value: float
    way: str = "graph"


@dataclass(frozen=True)
class GpuCase:
    """A benchmark case with its targets and peers on a GPU.

    group: cases of one group share a process
    steps: number of time steps of a recurrence
    exchanges: how often the SMs of a persistent kernel exchange activations in a step's forward;
        its backward has as many
    launches: the kernels that the loop of a recurrence launches in a step's forward; its backward
        has as many
    """

    benchmark: BenchmarkCase
    group: str
    targets: tuple = ()
    peers: dict = field(default_factory=dict)
    steps: int = 0
    exchanges: int = 0
    launches: int = 0
    name: str = ""

    def providers(self):
        found = {**self.benchmark.providers(full=False), **self.peers}
        # torch.compile unrolls the steps of a recurrence, which takes it 10 s each time.
        if self.steps and not any(target.against == "compiled" for target in self.targets):
            found.pop("compiled", None)
        return found


def recurrence(benchmark, *targets, steps, **more):
    return GpuCase(benchmark, "recurrent", targets, steps=steps, **more)


def modelled(low, high):
    """Returns the target from a model of the persistent kernel: low to high µs per forward step.

    The target is 1.5 times the middle of the estimate, with a backward that takes 1.5 times the
    forward.
    """
    return Target("us per step", 1.5 * 2.5 * (low + high) / 2)


def mogrifier(T, B, H, *targets, dtype=BF16, **options):
    benchmark = recurrence_cases.mogrifier(T, B, H, dtype=dtype, **options)
    return recurrence(benchmark, *targets, exchanges=6, steps=T)


def mogrifier_in_the_loop(T, B, H, *targets):
    """A layer whose weights no GPU holds on its SMs: a product and a kernel for each of five rounds
    and for the gates."""
    return recurrence(
        recurrence_cases.mogrifier(T, B, H, dtype=BF16), *targets, launches=12, steps=T
    )


def mogrifier_layers(T, B, H, layers, *targets):
    """Several layers in one module, which may run as a wavefront, against one module per layer."""
    # Modules on the meta device have no weights: these are arguments of the case.
    stacked, single = (nn.MogrifierLSTM(H, H, n, device="meta") for n in (layers, 1))
    names, names_of_layer = list(stacked.state_dict()), list(single.state_dict())

    def make(randn):
        x, *_ = testing.mogrifier_lstm_case(T, B, H, H).make(randn)[0]
        return (x, *(H**-0.5 * randn(*p.shape) for p in stacked.state_dict().values())), {}

    def call(ops, x, *weights):
        module = nn.MogrifierLSTM(H, H, layers, device="meta", ops=ops)
        return functional_call(module, dict(zip(names, weights, strict=True)), (x,))

    def in_sequence(x, *weights):
        by_name = dict(zip(names, weights, strict=True))
        for l in range(layers):
            state = {name: by_name[parameter_of_layer(name, l)] for name in names_of_layer}
            x, _ = functional_call(single, state, (x,))
        return x

    one = recurrence_cases.mogrifier(T, B, H, dtype=BF16)
    benchmark = replace(
        one,
        id=f"{one.id}-{layers}layers",
        make=make,
        call=call,
        parts=lambda args, kwargs: [],
        flops=layers * one.flops,
        traffic=layers * one.traffic,
        others={"in sequence": in_sequence},
    )
    return recurrence(benchmark, *targets, exchanges=6 * ((layers + 1) // 2), steps=T)


def parameter_of_layer(name, l):
    """Returns the name of layer l's parameter, given the name of the first layer's."""
    return name.replace("0", str(l), 1)


def lstm_with_weight_drop(T, B, X, H, *targets):
    """The masked W_hh; "torch" is cuDNN on the result of F.dropout, packed in every call."""
    benchmark = recurrence_cases.lstm(T, B, X, H, dropped=0.5, dtype=BF16)
    packed = {"cudnn unmasked": peers.PackedLSTM()}
    return recurrence(benchmark, *targets, exchanges=1, steps=T, peers=packed)


def peephole_lstm(T, B, X, H):
    """By the persistent kernels of cells other than the LSTM's."""
    benchmark = recurrence_cases.lstm_with_vectors("peephole_lstm", T, B, X, H, dtype=BF16)
    return recurrence(replace(benchmark, targets=()), exchanges=1, steps=T)


def bandwidth_bound(benchmark, *targets, **more):
    """A case that is limited by memory traffic: its targets are judged with a cold L2 cache."""
    cold = tuple(replace(target, way="cold") for target in targets)
    return GpuCase(replace(benchmark, targets=()), "memory", cold, **more)


def embedding(tokens, V, E, *targets, backward):
    """Counts the whole dense gradient: also the rows of words that do not occur are written."""
    benchmark = elementwise.embedding(V, tokens=tokens, E=E, backward=backward, dtype=BF16)
    traffic = (3 * tokens + V) * E if backward else 2 * tokens * E
    return bandwidth_bound(replace(benchmark, traffic=traffic), *targets)


def without_targets(benchmark, group):
    """A case of the suite, in bf16, that is timed without a target."""
    return GpuCase(replace(benchmark, targets=(), dtype=BF16), group)


def attention(B, N, L, D, *targets, backward=True, long=False, **options):
    """Forward moves q, k, v and out; backward also q, k, v, dout and three gradients."""
    benchmark = attention_cases.attention(B, N, L, D, dtype=BF16, **options)
    if not backward:
        benchmark = replace(benchmark, backward=False, traffic=4 * B * N * L * D)
    if long:
        # The oracle holds several L x L matrices in fp64: compare one sequence and two heads only.
        def parts(args, kwargs):
            return [("attention", [t[:1, :2] for t in args], kwargs)]

        benchmark = replace(benchmark, parts=parts)
    group = "attention-long" if long else "attention"
    return GpuCase(benchmark, group, targets, peers=peers.attention())


def attention_with_bias(B, N, L, D):
    """Attention with a bias for each head, which is read both ways and gets a gradient."""
    case = attention(B, N, L, D, tensors=("biasNLS",), suffix="-bias")
    traffic = case.benchmark.traffic + 3 * N * L * L
    return replace(case, benchmark=replace(case.benchmark, traffic=traffic))


def best_of(value, *also):
    providers = [*peers.attention(), "eager", "compiled", *also]
    return Target("best of " + ", ".join(providers), value)


def cross_entropy(N, E, V, *targets, **options):
    return GpuCase(losses.cross_entropy(N, E, V, dtype=BF16, **options), "losses", targets)


def norm(M, D, *targets):
    return bandwidth_bound(elementwise.norm(M, D, dtype=BF16), *targets)


def build_cases(most):
    """Returns all cases, with no size above `most`."""

    def n(size):
        return min(size, most)

    padded = {"tensors": ("lengths",), "seed": 5}
    return [
        # Recurrences, dropouts of weights and the embedding.
        mogrifier(
            n(70),
            n(20),
            n(650),
            Target("eager", 25, "call"),
            Target("compiled", 8, "call"),
            Target("us per step", 25),
        ),
        # With 80 rows the kernel runs in two groups of SMs.
        mogrifier(n(70), n(80), n(650), Target("eager", 15, "call"), modelled(12, 18)),
        mogrifier(n(70), n(20), n(1150), Target("eager", 15, "call"), modelled(12, 18)),
        mogrifier(
            n(70),
            n(64),
            n(912),
            Target("eager", 15, "call"),
            modelled(17, 27),
            rank=n(84),
            suffix="-rank84",
        ),
        mogrifier(n(70), n(20), n(650), dtype=torch.float32),
        mogrifier_layers(n(70), n(20), n(650), 3, Target("in sequence", 1.6)),
        mogrifier_in_the_loop(n(70), n(20), n(1600)),
        lstm_with_weight_drop(n(70), n(20), n(650), n(650), Target("torch", 2)),
        lstm_with_weight_drop(n(70), n(20), n(1150), n(1150), Target("torch", 2)),
        peephole_lstm(n(70), n(20), n(650), n(650)),
        *(
            bandwidth_bound(
                elementwise.elementwise(op, shape, 0.5, dtype=BF16), Target("copy", 0.85)
            )
            for op, shape in (
                ("locked_dropout", (n(70), n(704), n(650))),
                ("weight_drop", (n(8192), n(4096))),
            )
        ),
        *(
            embedding(n(50_000), n(100_000), n(650), Target("copy", 0.85), backward=b)
            for b in (False, True)
        ),
        without_targets(elementwise.regularization(n(70), n(704), n(650)), "memory"),
        without_targets(elementwise.feed_forward(n(65_536), n(2048), "gelu"), "memory"),
        # Attention, the output layer and the norm.
        attention(
            n(2048), n(8), n(6), n(32), Target("us", 2 * 5.9, "cold"), best_of(5), backward=False
        ),
        attention(n(2048), n(8), n(6), n(32), Target("us", 2 * (5.9 + 10.2), "cold"), best_of(5)),
        attention(
            n(64),
            n(8),
            n(90),
            n(64),
            best_of(2),
            causal=True,
            dropout=0.1,
            suffix="-lengths-causal-dropout.1",
            **padded,
        ),
        *(
            attention(
                n(64),
                n(N),
                n(90),
                n(D),
                best_of(3),
                dropout=0.3,
                suffix="-lengths-dropout.3",
                **padded,
            )
            for N, D in ((10, 10), (5, 20), (10, 30), (5, 60))
        ),
        attention_with_bias(n(8), n(8), n(512), n(64)),
        without_targets(attention_cases.decoding(n(1), n(8), n(4096), n(64)), "attention"),
        *(
            attention(
                n(B),
                n(16),
                n(L),
                n(D),
                Target("sdpa flash", 0.9),
                causal=True,
                backward=b,
                suffix="-causal",
                long=True,
            )
            for B, L in ((8, 2048), (2, 8192))
            for D in (64, 128)
            for b in (False, True)
        ),
        cross_entropy(n(2048), n(256), n(100_000), Target("us", 1.6 * 320), Target("eager", 2)),
        cross_entropy(
            n(4900), n(650), n(10_000), Target("us", 1.6 * 190), Target("eager", 2), bias=True
        ),
        norm(n(65_536), n(512), Target("copy", 0.8)),
    ]


def gpu_cases(rehearsal=False):
    """Returns the cases; in a rehearsal small ones, under the names of the real ones."""
    real = [replace(case, name=case.benchmark.name) for case in build_cases(1 << 30)]
    if not rehearsal:
        return real
    small = build_cases(REHEARSAL_SIZE)
    return [replace(case, name=named.name) for case, named in zip(small, real, strict=True)]


# In the order in which they are measured: the most important group first.
GROUPS = ("recurrent", "memory", "attention", "losses", "attention-long")
