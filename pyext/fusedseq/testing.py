"""The case table and the error budget: one judge of every operator, for tests/ and for bench/.

An operator is right where its error against the oracle in fp64 is within `budget` of the error that the oracle
itself makes when it runs in the operator's dtype. Random masks do not depend on the dtype, so dropout stays on.
"""

import inspect
import math
import zlib
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch.utils._pytree import tree_leaves, tree_map

from fusedseq import fused, reference

# ------------------------------------------------------------------------------------------------ the error budget


def budget(exact, plain, dtype, terms):
    """The largest error allowed against `exact` (fp64), where the plain implementation's result is `plain`.

    Twice the plain implementation's own error, and of the tensor's scale one rounding of the result to its dtype
    and the random walk of `terms` roundings in the dtype that sums are accumulated in (fp32 or wider): blocked sums
    need not round as the oracle's do, which in a small tensor may have been exact by luck.
    For fp64 `plain` is in fp32 and its error is scaled to fp64's unit; `exact` errs as much itself: three times then.
    """
    if exact.numel() == 0:
        return 0.0
    eps = torch.finfo(dtype).eps  # in which the products were rounded, also where the result is wider
    accumulator = min(eps, torch.finfo(torch.float32).eps)
    scale = exact.abs().max().item()
    own = (plain.double() - exact).abs().max().item() * eps / torch.finfo(plain_dtype(dtype)).eps
    return (3 if dtype == torch.float64 else 2) * own + 2 * eps * scale + 2 * accumulator * math.sqrt(terms) * scale


def plain_dtype(dtype):
    """The dtype in which the oracle's own error is measured: see `budget`."""
    return torch.float32 if dtype == torch.float64 else dtype


def assert_within_budget(name, got, plain, exact, dtype, terms):
    """`got`, computed in `dtype`, is of the dtype and the layout of `plain` (of fp64 where `dtype` is), and within budget;
    returns its error over the budget."""
    assert got.layout == plain.layout, f"{name}: layout {got.layout}, the oracle's is {plain.layout}"
    got, plain, exact = (t.detach().to_dense() if t.is_sparse else t.detach() for t in (got, plain, exact))
    assert got.shape == exact.shape, f"{name}: shape {tuple(got.shape)}, the oracle's is {tuple(exact.shape)}"
    assert got.device == exact.device, f"{name}: on {got.device}, the oracle's is on {exact.device}"
    if not exact.is_floating_point():
        assert got.dtype == exact.dtype, f"{name}: {got.dtype}, wanted {exact.dtype}"
        assert torch.equal(got, exact), f"{name}: differs from the oracle"
        return 0.0
    wanted = dtype if dtype == torch.float64 else plain.dtype
    assert got.dtype == wanted, f"{name}: {got.dtype}, wanted {wanted}"
    if got.numel() == 0:
        return 0.0
    allowed, error = budget(exact, plain, dtype, terms), (got.double() - exact).abs().nan_to_num(math.inf)
    worst = error.argmax()
    assert error.max() <= allowed, (
        f"{name}: error {error.max():.3g} > budget {allowed:.3g}, scale {exact.abs().max():.3g}: "
        f"at {tuple(int(i) for i in torch.unravel_index(worst, error.shape))} of {tuple(error.shape)} "
        f"{got.flatten()[worst]:.9g} for {exact.flatten()[worst]:.9g}"
    )
    return (error.max() / allowed).item() if allowed else 0.0


def longest_sum(tensors):
    """The most terms in one sum of a matrix product with these tensors: over rows or over the last dimension."""
    sizes = [(t.size(-1), t.numel() // t.size(-1)) for t in tensors if t.dim() and t.numel()]
    return max((n for pair in sizes for n in pair), default=1)


def roundings(op, args, leaves):
    """How many roundings may add up in one number of the operator's results or gradients: see `budget`."""
    if op in ("lstm", "mogrifier_lstm"):
        return longest_sum(leaves) * len(args[0])  # each of T steps adds those of its products
    if op == "mogrifier_lstm_pair":
        return 2 * longest_sum(leaves) * len(args[0])
    if op == "linear":
        return longest_sum(leaves)
    if op == "attention":
        (B, N, L, D), S = leaves[0].shape, leaves[1].size(2)
        return (L + S + D) * max(1, B * N if len(leaves) > 3 else 1)  # a bias or relative keys: summed over the heads
    if op in ("residual_layer_norm", "bias_activation_dropout"):
        return max(leaves[0].numel(), 1)  # a sum over the rows, or over one
    if op in ("linear_cross_entropy", "split_cross_entropy"):
        return longest_sum(leaves) + len(args[1])  # and those of the vocabulary
    if op in ("embedding", "activation_regularization"):
        return args[0].numel()  # one sum, over the ids of a word or over the activations
    return 1  # one product


def convert(tree, device=None, dtype=None):
    """The tree with its tensors on `device` and its float tensors in `dtype`."""

    def move(t):
        if not isinstance(t, torch.Tensor):
            return t
        return t.to(device, dtype if t.is_floating_point() else None)

    return tree_map(move, tree)


CONSTANTS = {"alibi", "class_weights", "rope"}  # float arguments without a gradient, given by name


def differentiable(args, kwargs):
    """The float tensors among the arguments that have a gradient, also inside tuples, in their order."""
    kwargs = {name: value for name, value in kwargs.items() if name not in CONSTANTS}
    return [t for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor) and t.is_floating_point()]


def names(op, args, kwargs):
    """The name of each of `differentiable(args, kwargs)`, e.g. W_ih or Q[0]."""
    bound = inspect.signature(getattr(reference, op)).bind(*args, **kwargs).arguments
    found = []
    for name, value in bound.items():
        leaves = differentiable((), {name: value})
        found += [name] if isinstance(value, torch.Tensor) and leaves else [f"{name}[{i}]" for i in range(len(leaves))]
    return found


def cotangents(outputs, expanded=False):
    """A fixed random gradient for each output, or with `expanded` the stride-0 ones that sum() gives."""
    if expanded:
        return [y.new_ones(()).expand_as(y) for y in outputs]
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(y.shape, generator=generator, device="cpu").to(y.device, y.dtype) for y in outputs]


def chosen(results, outputs):
    """The float results, of these numbers or all."""
    return [y for i, y in enumerate(results) if y.is_floating_point() and (outputs is None or i in outputs)]


def run(function, args, kwargs, needs=None, outputs=None, expanded=False, upstream=None):
    """Calls `function` and differentiates it: (its results, gradients of the inputs `needs`), both flat lists. Results
    that are no floats have no gradient.

    needs: which of `differentiable(args, kwargs)` require a gradient; all by default, [] for no backward
    outputs: which of the results have a gradient; all by default    expanded: as in `cotangents`
    upstream: the gradients of the results, by default `cotangents`
    """
    args, kwargs = tree_map(lambda t: t.detach() if isinstance(t, torch.Tensor) else t, (args, kwargs))
    leaves = differentiable(args, kwargs)
    leaves = leaves if needs is None else [leaves[i] for i in needs]
    for leaf in leaves:
        leaf.requires_grad_()
    results = tree_leaves(function(*args, **kwargs))
    if not leaves:
        return results, []
    used = chosen(results, outputs)
    upstream = convert(upstream, used[0].device, used[0].dtype) if upstream else cotangents(used, expanded)
    # A result may depend on none of the leaves.
    depend = [i for i, y in enumerate(used) if y.requires_grad]
    used, upstream = [used[i] for i in depend], [upstream[i] for i in depend]
    grads = torch.autograd.grad(used, leaves, upstream, materialize_grads=True)
    return [y.detach() for y in results], list(grads)


def check(op, args, kwargs, *, needs=None, backward=True, outputs=None, expanded=False, function=None, together=False):
    """Asserts that `fused.<op>` (or `function`) agrees with the oracle, forward and every gradient, within `budget`.

    needs, outputs, expanded: as in `run`    backward=False: the forward alone
    together: the gradients as one vector, which one that is 0 but for rounding is a part of
    returns the largest error found, as a fraction of its budget
    """
    leaves = differentiable(args, kwargs)
    dtype = leaves[0].dtype if leaves else torch.float32
    needs = [] if not backward or not leaves else list(range(len(leaves))) if needs is None else needs
    results, grads = run(function or getattr(fused, op), args, kwargs, needs, outputs, expanded)
    used = chosen(results, outputs)
    upstream = cotangents(used, expanded) if needs else None  # those of dtype, also where the oracle is wider
    oracle = [
        run(getattr(reference, op), *convert((args, kwargs), dtype=t), needs, outputs, upstream=upstream)
        for t in (plain_dtype(dtype), torch.float64)
    ]
    wrt = names(op, args, kwargs)
    labels = [f"{op}: result {i}" for i in range(len(results))] + [f"{op}: gradient of {wrt[i]}" for i in needs]
    found = [(results, grads), *oracle]
    if together and needs:
        labels[len(results) :] = [f"{op}: gradients"]
        found = [(y, [torch.cat([g.flatten() for g in grads])]) for y, grads in found]
    tensors = zip(labels, *(y + grads for y, grads in found), strict=True)
    return max(assert_within_budget(*each, dtype, roundings(op, args, leaves)) for each in tensors)


# ------------------------------------------------------------------------------------------------- the case table


@dataclass(frozen=True)
class Case:
    """Inputs of one operator: `make(randn)` gives (args, kwargs), where randn(*shape) draws a float tensor."""

    op: str  # the function's name in fusedseq.fused and fusedseq.reference
    id: str
    make: Callable[..., tuple[tuple, dict]]
    smooth: bool = True  # differentiable at these inputs, so that finite differences mean something

    def inputs(self, device="cpu", dtype=torch.float32):
        """(args, kwargs): always the same numbers, without requires_grad."""
        generator = torch.Generator().manual_seed(zlib.crc32(f"{self.op} {self.id}".encode()))
        with torch.device("cpu"):  # whatever the default device: the numbers are the same on each
            inputs = self.make(lambda *shape: torch.randn(shape, generator=generator))
        return convert(inputs, device, dtype)

    def __str__(self):
        return f"{self.op}-{self.id}"


def recurrent_inputs(randn, T, B, X, H, bias, scale):
    """x, W_ih, W_hh, b, h0, c0 with pre-activations of about `scale`; at 0 of i and f, but not of g and o."""
    W_ih, W_hh = scale * X**-0.5 * randn(4 * H, X), scale * H**-0.5 * randn(4 * H, H)
    b = randn(2, 2 * H) * torch.tensor([[scale], [scale or 1.0]])
    return randn(T, B, X), W_ih, W_hh, b.flatten() if bias else None, randn(B, H).tanh(), randn(B, H)


def lstm_case(T, B, X, H, *, bias=True, lengths=None, scale=1.0, **options):
    """options: the operator's own"""

    def make(randn):
        inputs = recurrent_inputs(randn, T, B, X, H, bias, scale)
        return inputs, options if lengths is None else {"lengths": torch.tensor(lengths), **options}

    words = [f"T{T}-B{B}-X{X}-H{H}", "nobias" * (not bias), "lengths" * (lengths is not None),
             f"scale{scale:g}" * (scale != 1)]  # fmt: skip
    words += [f"{name}{value:g}" for name, value in options.items() if name != "seed"]
    return Case("lstm", "-".join(w for w in words if w), make)


def mogrifier_lstm_case(
    T, B, X, H, rounds=5, *, rank=None, bias=True, mogrifier_bias=True, shared=False, lengths=None, scale=1.0, **options
):  # fmt: skip
    """options: the operator's own; scale: of the gates, 0 for exact ties of i and 1 - f"""

    def weight(randn, n, rows, columns):
        n = min(n, 1) if shared else n
        if n == 0:
            return None
        if rank is None:
            return columns**-0.5 * randn(n, rows, columns)
        std = (columns * rank) ** -0.25
        return std * randn(n, rows, rank), std * randn(n, rank, columns)

    def make(randn):
        inputs = recurrent_inputs(randn, T, B, X, H, bias, scale)
        n = (rounds + 1) // 2, rounds // 2
        Q, R = weight(randn, n[0], X, H), weight(randn, n[1], H, X)
        biases = [randn(min(k, 1) if shared else k, width) if mogrifier_bias and k else None
                  for k, width in zip(n, (X, H), strict=True)]  # fmt: skip
        kwargs = {"rounds": rounds, **options}
        if lengths is not None:
            kwargs["lengths"] = torch.tensor(lengths)
        return (*inputs, Q, R, *biases), kwargs

    words = [f"T{T}-B{B}-X{X}-H{H}-r{rounds}", f"rank{rank}" * (rank is not None), "nobias" * (not bias),
             "nomogrifierbias" * (not mogrifier_bias), "shared" * shared, "lengths" * (lengths is not None),
             f"scale{scale:g}" * (scale != 1)]  # fmt: skip
    words += [f"{name}{value:g}" for name, value in options.items() if name != "seed"]
    return Case("mogrifier_lstm", "-".join(w for w in words if w), make, smooth=scale != 0)


def mogrifier_lstm_pair_case(T, B, X, H, H_2, rounds=3, rounds_2=2, *, first=None, **second):
    """first, second: options of `mogrifier_lstm_case`"""
    cases = (
        mogrifier_lstm_case(T, B, X, H, rounds, **(first or {})),
        mogrifier_lstm_case(T, B, H, H_2, rounds_2, **second),
    )

    def make(randn):
        inputs, layers = [], []
        for case in cases:
            args, kwargs = case.make(randn)
            inputs.append(args[0])
            layers.append(dict(zip(PAIR_NAMES, args[1:], strict=False)) | kwargs)
        return (inputs[0], *layers), {}

    return Case("mogrifier_lstm_pair", "-then-".join(case.id for case in cases), make)


PAIR_NAMES = ("W_ih", "W_hh", "b", "h0", "c0", "Q", "R", "Q_bias", "R_bias")


def dropout_case(op, shape, p, seed=5, **options):
    """A case of dropout, locked_dropout or weight_drop."""
    words = ["x".join(map(str, shape)) or "scalar", f"p{p:g}", *(k for k, v in options.items() if v)]
    if isinstance(seed, torch.Tensor):
        words.append("tensor")
    if seed != 5:
        words.append(f"seed{int(seed)}")
    return Case(op, "-".join(words), lambda randn: ((randn(*shape), p, seed), options))


def dropout_mask_case(shape, p, seed):
    name = f"{'x'.join(map(str, shape)) or 'scalar'}-p{p:g}-seed{int(seed)}"
    return Case("dropout_mask", name, lambda randn: ((seed, p, shape), {}))


def embedding_case(shape, V, E, p=0.0, *, sparse=False):
    def make(randn):
        ids = torch.arange(math.prod(shape)).square() % V  # squares, so that some words repeat
        return (ids.reshape(shape), randn(V, E)), {"p": p, "seed": 5, "sparse": sparse}

    name = f"{'x'.join(map(str, shape))}-V{V}-E{E}-p{p:g}" + "-sparse" * sparse
    return Case("embedding", name, make)


def activation_regularization_case(T, B, H, alpha=2.0, beta=1.0):
    return Case("activation_regularization", f"T{T}-B{B}-H{H}-alpha{alpha:g}-beta{beta:g}",
                lambda randn: ((randn(T, B, H), randn(T, B, H), alpha, beta), {}))  # fmt: skip


def linear_case(M, K, N, bias=True):
    """M: of x, (M, K), or the tuple of all its dimensions but K"""
    rows = M if isinstance(M, tuple) else (M,)
    return Case("linear", f"M{'x'.join(map(str, rows))}-K{K}-N{N}{'-nobias' * (not bias)}",
                lambda randn: ((randn(*rows, K), K**-0.5 * randn(N, K), randn(N) if bias else None), {}))  # fmt: skip


def attention_case(B, N, L, S, D, *options, N_kv=None, projected=False, **settings):
    """options: of the operator's tensors, "bias" with letters for its whole dimensions, e.g. "biasNLS", "mask", "blind" (a
    mask with rows that see nothing), "lengths", "alibi", "relative2" for K = 2, "rope"; settings: the rest

    projected: q, k and v are views of one (B, L, 3, N, D), as a model's projection gives them
    """

    def make(randn):
        sizes = {"B": B, "N": N, "L": L, "S": S}
        q, k, v = randn(B, N, L, D), randn(B, N_kv or N, S, D), randn(B, N_kv or N, S, D)
        if projected:
            q, k, v = randn(B, L, 3, N, D).permute(2, 0, 3, 1, 4)
        kwargs = dict(settings)
        for option in options:
            if option.startswith("bias"):
                kwargs["bias"] = randn(*(size if name in option[4:] else 1 for name, size in sizes.items()))
            elif option == "mask":
                kwargs["mask"] = randn(B, 1, L, S) < 0.5
            elif option == "blind":
                kwargs["mask"] = (torch.arange(L) % 3 != 1)[:, None].expand(L, S)
            elif option == "lengths":
                kwargs["key_lengths"] = (torch.arange(B) * 3 + S - 2) % (S + 1)
            elif option == "alibi":
                kwargs["alibi"] = 2.0 ** -torch.arange(1.0, N + 1)
            elif option.startswith("relative"):
                kwargs["relative_keys"] = randn(2 * int(option[8:]) + 1, D)
            elif option == "rope":
                angles = torch.outer(torch.arange(64.0 + S + L), 10000.0 ** (-2 * torch.arange(D // 2) / D))
                kwargs["rope"] = torch.stack([angles.cos(), angles.sin()], -1).flatten(1)
            else:
                raise ValueError(option)
        return (q, k, v), kwargs

    words = [f"B{B}-N{N}-L{L}-S{S}-D{D}", *options, f"Nkv{N_kv}" * (N_kv is not None), "projected" * projected]
    words += [f"{name}{value:g}" for name, value in settings.items() if name != "seed"]
    return Case("attention", "-".join(w for w in words if w), make)


def residual_layer_norm_case(shape, *, residual=True, weight=True, bias=True, scale=1.0, **options):
    """scale: of the rows; 0 for rows without variance"""

    def make(randn):
        D = shape[-1]
        args = scale * randn(*shape), scale * randn(*shape) if residual else None
        return (*args, 1 + 0.1 * randn(D) if weight else None, randn(D) if bias else None), options

    without = [f"no{name}" for name, given in (("residual", residual), ("weight", weight), ("bias", bias)) if not given]
    words = ["x".join(map(str, shape)), *without, *[f"scale{scale:g}"] * (scale != 1)]
    words += [f"{k}{v:g}" for k, v in options.items() if k != "seed"]
    return Case("residual_layer_norm", "-".join(words), make)


def bias_activation_dropout_case(shape, activation, p=0.0, seed=7, *, bias=True):
    def make(randn):
        return (randn(*shape), randn(shape[-1]) if bias else None, activation, p, seed), {}

    name = f"{'x'.join(map(str, shape))}-{activation}-p{p:g}" + "-nobias" * (not bias)
    return Case("bias_activation_dropout", name, make)


def linear_cross_entropy_case(N, E, V, bias=True, *, ignored=0, weighted=False, **options):
    """ignored: every so many rows have no target, 1 for all; N: a number of rows, or a shape; options: the operator's own"""
    shape = N if isinstance(N, tuple) else (N,)

    def make(randn):
        row = torch.arange(math.prod(shape))
        target = row.square() % V
        if ignored:
            target = torch.where(row % ignored == 0, options.get("ignore_index", -100), target)
        inputs = randn(*shape, E), E**-0.5 * randn(V, E), target.reshape(shape), randn(V) if bias else None
        weights = {"class_weights": (1 + torch.arange(V) % 7) / 4} if weighted else {}  # exact in every dtype
        return inputs, options | weights

    words = ["x".join(map(str, shape)), f"E{E}", f"V{V}", "nobias" * (not bias), f"ignored{ignored}" * bool(ignored),
             "weighted" * weighted]  # fmt: skip
    words += [f"{name}{value:g}" if not isinstance(value, str) else value for name, value in options.items()]
    return Case("linear_cross_entropy", "-".join(w for w in words if w), make)


def split_cross_entropy_case(N, E, V, splits, bias=True, tombstone_bias=True, *, ignored=0, reduction="mean"):
    """ignored: every so many rows have no target"""

    def make(randn):
        row, K = torch.arange(N), len(splits)
        target = row.square() % V
        target = torch.where(row % ignored == 0, -100, target) if ignored else target
        tombstones = (
            randn(K, E) if K else None,
            splits,
            randn(V) if bias else None,
            randn(K) if K and tombstone_bias else None,
        )
        return (randn(N, E), E**-0.5 * randn(V, E), target, *tombstones), {"reduction": reduction}

    words = [f"{N}-E{E}-V{V}-splits{'x'.join(map(str, splits))}", "nobias" * (not bias), f"ignored{ignored}" * bool(ignored),
             "notombstonebias" * (not tombstone_bias), reduction]  # fmt: skip
    return Case("split_cross_entropy", "-".join(w for w in words if w), make)


# T, B, X, H
SIZES = [(1, 1, 1, 1), (3, 2, 3, 1), (1, 3, 17, 3), (5, 1, 5, 17), (4, 3, 3, 17), (3, 0, 5, 4), (2, 2, 650, 650)]

CASES = [
    *(lstm_case(*size) for size in SIZES),
    lstm_case(4, 3, 5, 7, bias=False),
    lstm_case(5, 4, 6, 5, lengths=[3, 0, 5, 1]),
    lstm_case(3, 2, 5, 7, scale=30.0),  # saturated gates
    lstm_case(33, 9, 20, 24, lengths=[33, 1, 2, 7, 0, 32, 16, 17, 5]),
    lstm_case(3, 70, 33, 40),
    *(lstm_case(3, 2, 5, 7, weight_drop=p, variational=v, seed=5) for p in (0.5, 1.0) for v in (False, True)),
    lstm_case(3, 2, 5, 7, weight_drop=0.5, seed=5, training=False),
    lstm_case(5, 4, 6, 5, bias=False, lengths=[3, 0, 5, 1], weight_drop=0.3, seed=torch.tensor(2**63 - 2)),
    lstm_case(3, 20, 33, 130, weight_drop=0.4, seed=-1),
    *(mogrifier_lstm_case(*size) for size in SIZES),
    *(mogrifier_lstm_case(3, 2, 5, 4, rounds) for rounds in range(5)),
    *(mogrifier_lstm_case(3, 2, 5, 4, rounds, rank=2) for rounds in (1, 2, 5)),
    mogrifier_lstm_case(3, 2, 5, 4, bias=False),
    mogrifier_lstm_case(3, 2, 5, 4, mogrifier_bias=False),
    mogrifier_lstm_case(3, 2, 5, 4, mogrifier_bias=False, bias=False, rank=1),
    mogrifier_lstm_case(3, 2, 5, 4, shared=True),
    mogrifier_lstm_case(3, 2, 5, 4, shared=True, rank=3),
    mogrifier_lstm_case(5, 4, 6, 5, lengths=[3, 0, 5, 1]),
    mogrifier_lstm_case(3, 2, 5, 4, scale=10.0),
    mogrifier_lstm_case(3, 2, 5, 4, cap_input_gate=True),
    mogrifier_lstm_case(3, 2, 5, 4, cap_input_gate=True, scale=0.0),  # i = 1 - f = 1/2: the gradient is shared
    *(mogrifier_lstm_case(3, 2, 5, 4, seed=-3, input_dropout=p, locked_input=l)
      for p in (0.5, 1.0) for l in (False, True)),
    *(mogrifier_lstm_case(3, 2, 5, 4, seed=5, **{name: p}) for p in (0.5, 1.0)
      for name in ("state_dropout", "zoneout_h", "zoneout_c")),
    *(mogrifier_lstm_case(3, 2, 5, 4, weight_drop=p, variational=v, seed=5) for p in (0.5, 1.0) for v in (False, True)),
    mogrifier_lstm_case(3, 2, 5, 4, weight_drop=0.5, seed=5, training=False),
    mogrifier_lstm_case(3, 2, 5, 4, zoneout_h=0.25, zoneout_c=0.75, training=False),
    mogrifier_lstm_case(3, 2, 5, 4, input_dropout=0.5, state_dropout=0.5, zoneout_h=0.5, training=False),
    mogrifier_lstm_case(3, 2, 5, 4, 0, state_dropout=0.5, input_dropout=0.5),
    mogrifier_lstm_case(4, 3, 7, 5, lengths=[4, 2, 0], state_dropout=0.3, zoneout_h=0.2, zoneout_c=0.1),
    mogrifier_lstm_case(
        5, 3, 17, 3, rank=2, lengths=[5, 0, 2], cap_input_gate=True, input_dropout=0.3, locked_input=True,
        state_dropout=0.2, zoneout_h=0.1, zoneout_c=0.4, seed=2**40 + 7,
    ),
    mogrifier_lstm_case(
        5, 3, 17, 9, rank=2, lengths=[5, 0, 2], cap_input_gate=True, state_dropout=0.2, zoneout_h=0.1, zoneout_c=0.4,
        weight_drop=0.3, seed=2**40 + 7,
    ),
    mogrifier_lstm_case(11, 33, 20, 24, 4, input_dropout=0.5, state_dropout=0.5, zoneout_c=0.3, seed=11),
    # wide enough for several threads to share a row of a mask
    mogrifier_lstm_case(2, 17, 9, 100, 2, state_dropout=0.5, zoneout_h=0.5, zoneout_c=0.3, seed=11),
    mogrifier_lstm_pair_case(1, 1, 1, 1, 1),
    mogrifier_lstm_pair_case(2, 0, 3, 4, 5),
    mogrifier_lstm_pair_case(3, 2, 5, 4, 7, input_dropout=0.5, seed=3),
    mogrifier_lstm_pair_case(4, 3, 7, 5, 3, 5, 4, first={"rank": 2, "shared": True}, input_dropout=0.4, locked_input=True, seed=-9),
    mogrifier_lstm_pair_case(3, 2, 5, 4, 3, 0, 1, first={"input_dropout": 0.3, "bias": False}, mogrifier_bias=False),
    mogrifier_lstm_pair_case(3, 2, 5, 4, 3, first={"training": False, "zoneout_h": 0.3}, input_dropout=0.5, training=False),
    mogrifier_lstm_pair_case(
        5, 3, 17, 9, 6, 5, 2,
        first={"lengths": [5, 0, 2], "state_dropout": 0.2, "zoneout_h": 0.1, "input_dropout": 0.2, "seed": 4},
        lengths=[5, 0, 2], cap_input_gate=True, zoneout_c=0.4, weight_drop=0.3, input_dropout=0.3, seed=2**40 + 7,
    ),
    mogrifier_lstm_pair_case(11, 33, 20, 24, 20, 4, 3, input_dropout=0.5, seed=11),
    *(dropout_case("dropout", shape, p)
      for shape in ((), (1,), (3,), (2, 3, 5), (0, 5), (4, 0)) for p in (0.0, 0.5, 1.0)),
    dropout_case("dropout", (7, 17), 0.3, torch.tensor(-9)),
    dropout_case("dropout", (7, 17), 0.3, torch.tensor([2**60])),
    dropout_case("dropout", (130, 650), 0.25, -1),
    *(dropout_case("locked_dropout", shape, p) for shape in ((1, 1, 1), (4, 3, 5), (3, 0, 5)) for p in (0.0, 0.5, 1.0)),
    dropout_case("locked_dropout", (3, 5, 7), 0.4, torch.tensor(2**40)),
    dropout_case("locked_dropout", (20, 11, 650), 0.1, 2**63 - 1),
    *(dropout_case("weight_drop", (5, 3), p, variational=v) for p in (0.0, 0.5, 1.0) for v in (False, True)),
    dropout_case("weight_drop", (1, 1), 0.5),
    dropout_case("weight_drop", (12, 3), 0.5, torch.tensor(-5), variational=True),
    dropout_case("weight_drop", (520, 650), 0.3),
    dropout_case("weight_drop", (2600, 17), 0.3, variational=True),
    *(embedding_case((4, 3), 7, 5, p, sparse=s) for p in (0.0, 0.5, 1.0) for s in (False, True)),
    embedding_case((), 3, 4, 0.2),
    embedding_case((2, 3, 2), 1, 1, 0.3),
    embedding_case((0,), 7, 5, 0.5),
    embedding_case((3, 0), 7, 5, 0.5, sparse=True),
    embedding_case((35, 20), 1000, 65, 0.1),
    embedding_case((35, 20), 100, 650, 0.1, sparse=True),
    *(attention_case(*size) for size in (
        (1, 1, 1, 1, 1), (2, 3, 6, 6, 4), (2, 2, 5, 7, 10), (1, 2, 1, 9, 6), (2, 1, 3, 1, 3), (0, 2, 3, 4, 5),
        (1, 2, 17, 33, 20), (2, 1, 49, 130, 30), (1, 1, 5, 6, 300))),
    attention_case(2, 2, 6, 6, 5, causal=True),
    attention_case(2, 2, 3, 7, 5, causal=True),
    attention_case(2, 2, 7, 3, 5, causal=True),  # the first queries see nothing
    attention_case(1, 2, 4, 6, 5, causal=True, offset=1),
    attention_case(1, 1, 4, 6, 5, causal=True, offset=-2),
    attention_case(2, 2, 100, 100, 10, causal=True),
    attention_case(4, 2, 4, 5, 8, "lengths"),
    attention_case(4, 2, 5, 5, 8, "lengths", causal=True, dropout=0.4, seed=7),
    attention_case(2, 2, 4, 5, 3, "mask"),
    attention_case(2, 2, 7, 5, 3, "blind"),
    attention_case(2, 2, 4, 5, 3, "mask", "lengths", "biasNLS", causal=True, scale=0.7),
    *(attention_case(2, 3, 4, 5, 3, f"bias{dims}") for dims in ("S", "NS", "NLS", "BLS", "BNLS")),
    attention_case(3, 2, 34, 35, 6, "biasNLS", "lengths", dropout=0.2, seed=3),
    attention_case(2, 3, 5, 6, 4, "alibi"),
    attention_case(2, 3, 6, 6, 4, "alibi", causal=True),
    *(attention_case(2, 2, 5, 6, 4, f"relative{K}") for K in (0, 2, 9)),
    attention_case(0, 2, 3, 4, 5, "relative2", "biasNLS"),
    attention_case(2, 2, 35, 34, 6, "relative3", "lengths", causal=True, dropout=0.2, seed=4),
    attention_case(2, 2, 5, 6, 4, "rope"),
    attention_case(2, 2, 6, 6, 20, "rope", causal=True, offset=3),
    attention_case(2, 2, 18, 18, 10, "rope", "relative2", "alibi", "biasNLS", "mask", "lengths", causal=True, dropout=0.3, seed=-9),
    *(attention_case(2, 2, 4, 6, 5, dropout=p, seed=11) for p in (0.5, 1.0)),
    attention_case(3, 2, 33, 70, 8, dropout=0.1, seed=2**40 + 3),
    attention_case(2, 4, 5, 6, 3, N_kv=2),
    attention_case(2, 6, 33, 35, 10, "lengths", "rope", N_kv=2, causal=True, dropout=0.2, seed=1),
    attention_case(2, 4, 5, 6, 3, "biasNLS", N_kv=1),
    attention_case(2, 3, 6, 6, 4, projected=True),
    # few queries over many keys, as in decoding
    attention_case(1, 2, 1, 40, 64, offset=20, causal=True),
    attention_case(2, 2, 2, 37, 70, "mask"),
    attention_case(3, 4, 1, 40, 20, "lengths", "rope", "relative3", "alibi", "biasNLS", N_kv=2, dropout=0.2, seed=6),
    attention_case(2, 5, 90, 90, 20, "lengths", projected=True, dropout=0.3, seed=5),
    *(linear_case(*size) for size in ((1, 1, 1), (3, 17, 1), (0, 3, 5), (7, 5, 33), (150, 33, 100), (20, 800, 70), (200, 64, 90), (1, 64, 5), (7, 1040, 37))),
    linear_case(5, 7, 9, bias=False),
    # By the transposed product: whole vectors of rows, nearly whole ones, and some that are left.
    *(linear_case(*size) for size in ((16, 33, 100), ((8, 5), 64, 131), (64, 48, 50), (29, 20, 49), (12, 7, 5), (33, 16, 3))),
    linear_case((2, 3, 6), 32, 70, bias=False),
    linear_case((), 9, 4),
    Case("linear", "T2-B3-K5-N4", lambda randn: ((randn(2, 3, 5), randn(4, 5), randn(4)), {})),
    *(linear_cross_entropy_case(*size) for size in (
        (1, 1, 1), (3, 17, 1), (0, 3, 5), (1, 5, 1000), (7, 5, 33), (300, 33, 100), (20, 80, 1700))),
    linear_cross_entropy_case((2, 3), 5, 9, bias=False),
    *(linear_cross_entropy_case((2, 3), 5, 9, ignored=3, reduction=r, return_details=True) for r in ("mean", "sum", "none")),
    *(linear_cross_entropy_case(7, 5, 9, ignored=1, reduction=r, return_details=True) for r in ("mean", "none")),
    linear_cross_entropy_case(9, 5, 33, label_smoothing=0.1),
    linear_cross_entropy_case(9, 5, 33, z_loss=0.1),
    linear_cross_entropy_case(9, 5, 33, temperature=0.5),
    *(linear_cross_entropy_case(9, 5, 33, bias, weighted=True, ignored=4, ignore_index=3, label_smoothing=0.25, z_loss=0.1,
                                temperature=0.75, reduction=r, return_details=True)
      for bias, r in ((True, "mean"), (False, "sum"), (True, "none"))),
    *(split_cross_entropy_case(9, 5, 33, splits, reduction=r) for splits in ((), (4,), (4, 5, 20)) for r in ("mean", "none")),
    split_cross_entropy_case(2, 5, 33, (4, 20), ignored=1),
    split_cross_entropy_case(3, 1, 2, (1,)),
    split_cross_entropy_case(0, 5, 9, (4,), reduction="sum"),
    split_cross_entropy_case(9, 5, 33, (4, 20), bias=False, ignored=2, reduction="sum"),
    split_cross_entropy_case(9, 5, 33, (4, 20), bias=False, tombstone_bias=False),
    split_cross_entropy_case(30, 20, 700, (50, 80, 200, 600), tombstone_bias=False, ignored=5),
    linear_cross_entropy_case(30, 20, 700, weighted=True, ignored=5, label_smoothing=0.25, z_loss=0.1, temperature=2.0),
    *(activation_regularization_case(*size) for size in ((1, 1, 1), (1, 3, 5), (2, 1, 1), (5, 3, 17), (20, 7, 650))),
    activation_regularization_case(5, 3, 17, 0.0, 1.0),
    activation_regularization_case(5, 3, 17, 1.0, 0.0),
    *(residual_layer_norm_case((3, D)) for D in (1, 2, 5, 16, 17, 33)),
    *(residual_layer_norm_case((3, 7), p=p, prenorm=n, seed=3) for p in (0.0, 0.4, 1.0) for n in (False, True)),
    *(residual_layer_norm_case((2, 3, 5), residual=False, p=0.3, prenorm=n, seed=-8) for n in (False, True)),
    residual_layer_norm_case((3, 5), weight=False, bias=False, p=0.3),
    residual_layer_norm_case((3, 5), weight=False),
    residual_layer_norm_case((3, 5), bias=False, prenorm=True),
    residual_layer_norm_case((9,), p=0.2, seed=5),
    residual_layer_norm_case((0, 5), p=0.2, prenorm=True),
    residual_layer_norm_case((3, 5), scale=0.0, p=0.2, eps=0.1),
    residual_layer_norm_case((3, 5), scale=100.0, eps=0.0),
    residual_layer_norm_case((5, 3, 6), p=0.5, prenorm=True, seed=2**40 + 1),
    residual_layer_norm_case((37, 4, 30), p=0.1, seed=torch.tensor(-4)),
    residual_layer_norm_case((67, 650), p=0.3, prenorm=True, seed=6),
    residual_layer_norm_case((2, 3001), p=0.3, seed=6),
    *(residual_layer_norm_case((3, 4097), p=0.3, prenorm=n, seed=6) for n in (False, True)),  # chunks, on a GPU
    residual_layer_norm_case((5001, 3), p=0.3, seed=6),  # blocks of more than 16 rows
    *(bias_activation_dropout_case((2, 3, 5), a, p) for a in ("relu", "gelu", "gelu_tanh", "tanh") for p in (0.0, 0.4)),
    *(bias_activation_dropout_case((D,), "gelu", 0.2) for D in (1, 16, 17)),
    bias_activation_dropout_case((3, 7), "relu", 1.0),
    bias_activation_dropout_case((3, 7), "relu", 0.3, torch.tensor(-5), bias=False),
    bias_activation_dropout_case((3, 7), "gelu", 0.3, bias=False),
    bias_activation_dropout_case((0, 5), "gelu", 0.3),
    bias_activation_dropout_case((4, 0), "relu", 0.3),
    *(bias_activation_dropout_case((130, 257), a, 0.1, 2**50) for a in ("relu", "gelu", "gelu_tanh", "tanh")),
    bias_activation_dropout_case((5001, 3), "gelu", 0.1, -1),
    *(dropout_mask_case((3, last), 0.5, 2**32 + last) for last in (*range(10), 650)),
    *(dropout_mask_case((2, 3, 5), p, -4) for p in (0.0, 1e-9, 0.3, 1.0)),
    dropout_mask_case((7,), 0.5, torch.tensor(-(2**63))),
    dropout_mask_case((0, 5), 0.5, 1),
    dropout_mask_case((), 0.5, 1),
]  # fmt: skip
