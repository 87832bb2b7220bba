"""Forward-mode AD and the transforms of torch.func: jvp, vjp, grad, jacrev, jacfwd, hessian, vmap.

No transform may lose a tangent, a gradient or a batch dimension. The references are reverse mode by
autograd, which tests/operators/test_operators.py compares with the oracle, and the oracle itself
under the same transform.
"""

import importlib

import pytest
import torch
from fusedseq import fused, nn, reference
from fusedseq.fused import recurrent_cell
from fusedseq.testing import CASES, differentiable
from torch.autograd import forward_ad
from torch.func import functional_call, grad, hessian, jacfwd, jacrev, jvp, vjp, vmap
from torch.utils._pytree import tree_leaves, tree_map


def flat(case, function):
    """A function of the case's float inputs that returns the float results, and these inputs."""
    args, kwargs = case.inputs(dtype=torch.float64)
    leaves = differentiable(args, kwargs)

    def of_leaves(*given):
        places = {id(leaf): new for leaf, new in zip(leaves, given, strict=True)}
        a, k = tree_map(lambda t: places.get(id(t), t), (args, kwargs))
        results = tree_leaves(function(*a, **k))
        return tuple(y for y in results if y.is_floating_point())

    return of_leaves, tuple(t.detach() for t in leaves)


def random_like(tensors, seed=2):
    generator = torch.Generator().manual_seed(seed)
    return tuple(torch.randn(t.shape, generator=generator, dtype=t.dtype) for t in tensors)


def small(most):
    """Parametrizes a test with cases of at most so many elements, some for each operator. torch's
    own embedding has no batched gradient without ids.
    """

    def suits(case):
        leaves = differentiable(*case.inputs())
        size = sum(t.numel() for t in leaves)
        return (
            0 < size <= most
            and all(t.numel() for t in leaves)
            and "sparse" not in case.id
            and "embedding-0" not in str(case)
        )

    found = [case for case in CASES if suits(case)]
    assert {case.op for case in found} == {case.op for case in CASES} - {"dropout_mask"}
    return pytest.mark.parametrize("case", found, ids=str)


def by_autograd(function, leaves, cotangents):
    leaves = [t.clone().requires_grad_() for t in leaves]
    results = function(*leaves)
    pairs = [(y, g) for y, g in zip(results, cotangents, strict=True) if y.requires_grad]
    return torch.autograd.grad(
        [y for y, _ in pairs], leaves, [g for _, g in pairs], materialize_grads=True
    )


def dot(a, b):
    return sum((x * y).sum() for x, y in zip(a, b, strict=True))


@small(1000)
def test_jvp_is_the_transpose_of_reverse_mode(case):
    function, leaves = flat(case, getattr(fused, case.op))
    tangents = random_like(leaves)
    results, found = jvp(function, leaves, tangents)
    for a, b in zip(results, function(*leaves), strict=True):
        torch.testing.assert_close(a, b)
    cotangents = random_like(results, seed=3)
    grads = by_autograd(function, leaves, cotangents)
    torch.testing.assert_close(dot(found, cotangents), dot(grads, tangents))


@small(100)
@pytest.mark.parametrize("requires_grad", [False, True])
def test_dual_tensors_keep_their_tangents(case, requires_grad):
    function, leaves = flat(case, getattr(fused, case.op))
    tangents = random_like(leaves)
    _, wanted = jvp(flat(case, getattr(reference, case.op))[0], leaves, tangents)
    with forward_ad.dual_level():
        duals = [
            forward_ad.make_dual(t.clone().requires_grad_(requires_grad), v)
            for t, v in zip(leaves, tangents, strict=True)
        ]
        found = [forward_ad.unpack_dual(y).tangent for y in function(*duals)]
    for a, b in zip(found, wanted, strict=True):
        torch.testing.assert_close(torch.zeros_like(b) if a is None else a, b)


@small(100)
def test_a_backward_keeps_the_tangents_of_incoming_gradients(case):
    """The forward pass is recorded before the dual level begins."""

    def tangents_of_gradients(namespace):
        function, leaves = flat(case, getattr(namespace, case.op))
        leaves = [t.clone().requires_grad_() for t in leaves]
        results = [y for y in function(*leaves) if y.requires_grad]
        with forward_ad.dual_level():
            duals = [
                forward_ad.make_dual(g, t)
                for g, t in zip(random_like(results), random_like(results, seed=3), strict=True)
            ]
            grads = torch.autograd.grad(results, leaves, duals, materialize_grads=True)
            pairs = [(g, forward_ad.unpack_dual(g).tangent) for g in grads]
        return [torch.zeros_like(g) if t is None else t for g, t in pairs]

    found, wanted = tangents_of_gradients(fused), tangents_of_gradients(reference)
    torch.testing.assert_close(found, wanted)


def test_registered_operators_keep_tangents():
    x, W, v = torch.randn(3, 4), torch.randn(5, 4), torch.randn(3, 4)
    with forward_ad.dual_level():
        y = torch.ops.fusedseq.linear(forward_ad.make_dual(x, v), W, None)
        torch.testing.assert_close(forward_ad.unpack_dual(y).tangent, v @ W.T)
    _, tangent = jvp(lambda x: torch.ops.fusedseq.linear(x, W, None), (x,), (v,))
    torch.testing.assert_close(tangent, v @ W.T)
    found = grad(lambda x: torch.ops.fusedseq.linear(x, W, None).square().sum())(x)
    torch.testing.assert_close(found, 2 * x @ W.T @ W)
    h, weight = torch.zeros(2, 4), torch.randn(16, 4)
    outputs = torch.ops.fusedseq.lstm
    _, (y, *_) = jvp(
        lambda x: outputs(x, None, False, weight, weight, None, h, h, None, None, 0.0, False)[:3],
        (torch.randn(3, 2, 4),),
        (torch.randn(3, 2, 4),),
    )
    assert y.abs().min() > 0


def test_ordinary_tensors_inside_a_dual_level_run_the_kernel():
    x, W = torch.randn(3, 4), torch.randn(5, 4)
    with forward_ad.dual_level():
        y = fused.linear(x, W)
        assert forward_ad.unpack_dual(y).tangent is None
    assert torch.equal(y, fused.linear(x, W))


@small(1000)
def test_vjp_gives_the_bits_of_autograd(case):
    function, leaves = flat(case, getattr(fused, case.op))
    results, backward = vjp(function, *leaves)
    cotangents = random_like(results)
    for a, b in zip(backward(cotangents), by_autograd(function, leaves, cotangents), strict=True):
        assert torch.equal(a, b)


def test_grad_runs_the_kernels(monkeypatch):
    """The oracle is not computed for a first derivative, also if a graph of it is created."""
    x, W = torch.randn(3, 4), torch.randn(5, 4, requires_grad=True)

    def refuse(*args):
        raise AssertionError("the oracle was computed")

    monkeypatch.setattr(reference, "linear", refuse)
    wanted = torch.ones(3, 5).T @ x
    torch.testing.assert_close(grad(lambda W: fused.linear(x, W).sum())(W), wanted)
    (found,) = torch.autograd.grad(fused.linear(x, W).sum(), W, create_graph=True)
    torch.testing.assert_close(found, wanted)


@small(80)
def test_jacobians_and_batches(case):
    function, leaves = flat(case, getattr(fused, case.op))
    oracle, _ = flat(case, getattr(reference, case.op))
    places = tuple(range(len(leaves)))
    for transform in (jacrev, jacfwd):
        torch.testing.assert_close(
            transform(function, places)(*leaves), transform(oracle, places)(*leaves)
        )
    batch = torch.stack([leaves[0], leaves[0] * 0.5, leaves[0] + 1])
    found = vmap(lambda first: function(first, *leaves[1:]))(batch)
    for i, first in enumerate(batch):
        for a, b in zip(found, function(first, *leaves[1:]), strict=True):
            torch.testing.assert_close(a[i], b)


@pytest.mark.parametrize("op", ["linear", "lstm", "attention"])
def test_second_derivatives(op):
    case = min(
        (c for c in CASES if c.op == op and all(t.numel() for t in differentiable(*c.inputs()))),
        key=lambda c: sum(t.numel() for t in differentiable(*c.inputs())),
    )

    def scalar(namespace):
        function, leaves = flat(case, getattr(namespace, op))
        return lambda first: sum(y.square().sum() for y in function(first, *leaves[1:])), leaves[0]

    (f, x), (g, _) = scalar(fused), scalar(reference)
    wanted = hessian(g)(x)
    torch.testing.assert_close(hessian(f)(x), wanted)
    torch.testing.assert_close(jacrev(jacrev(f))(x), wanted)
    torch.testing.assert_close(
        grad(lambda x: grad(f)(x).sum())(x), grad(lambda x: grad(g)(x).sum())(x)
    )


MODULES = {
    "lstm": (lambda ops: nn.LSTM(4, 3, num_layers=2, ops=ops), lambda m, x: m(x)[0]),
    "mogrifier_lstm": (lambda ops: nn.MogrifierLSTM(4, 3, ops=ops), lambda m, x: m(x)[0]),
    "attention": (lambda ops: nn.MultiheadAttention(4, 2, ops=ops), lambda m, x: m(x, x, x)[0]),
    "feed_forward": (lambda ops: nn.FeedForward(4, 8, ops=ops), lambda m, x: m(x)),
    "layer_norm": (lambda ops: nn.ResidualLayerNorm(4, ops=ops), lambda m, x: m(x, x.sin())),
}


@pytest.mark.parametrize("name", MODULES)
def test_modules(name):
    make, call = MODULES[name]
    torch.manual_seed(0)
    modules = [make(fused).double().eval()]
    modules.append(make(reference).double().eval())
    modules[1].load_state_dict(modules[0].state_dict())
    x, v = torch.randn(2, 3, 5, 4, dtype=torch.float64)[:, :, :2]

    def all_of(module):
        parameters = {name: p.detach() for name, p in module.named_parameters()}

        def loss(parameters, x):
            def with_parameters(*inputs):
                return functional_call(module, parameters, inputs)

            return call(with_parameters, x).square().sum()

        per_sample = vmap(grad(loss), (None, 1))(parameters, x[:, :, None])
        return (
            jvp(lambda x: call(module, x), (x,), (v,))[1],
            jacfwd(lambda x: call(module, x))(x),
            grad(loss)(parameters, x),
            per_sample,
        )

    found, wanted = map(all_of, modules)
    assert found[0].abs().max() > 0
    torch.testing.assert_close(found, wanted)


def test_embedding_with_a_sparse_gradient():
    """Transforms have no sparse gradients: they get a dense one."""
    ids, W = torch.tensor([1, 1, 3]), torch.randn(5, 2)
    found = grad(lambda W: fused.embedding(ids, W, sparse=True).square().sum())(W)
    wanted = torch.zeros_like(W)
    wanted.index_add_(0, ids, 2 * W[ids])
    torch.testing.assert_close(found, wanted)


def test_a_batch_of_ids():
    ids, W = torch.tensor([[1, 2], [3, 0]]), torch.randn(5, 2)
    assert torch.equal(vmap(lambda i: fused.embedding(i, W))(ids), W[ids])


def recurrent_call(op, namespace=fused, **options):
    """f(x, W_hh) -> y of a recurrence in fp64, with weight drop; and these two inputs."""
    T, B, X, H = 4, 2, 3, 3
    randn = torch.Generator().manual_seed(3)

    def make(*shape):
        return torch.randn(*shape, generator=randn, dtype=torch.float64)

    x, W_ih, W_hh, b, h0, c0 = (
        make(*s) for s in ((T, B, X), (4 * H, X), (4 * H, H), (4 * H,), (B, H), (B, H))
    )
    rounds = {"Q": make(1, X, H), "R": make(1, H, X), "rounds": 2} if op != "lstm" else {}
    more = {"weight_drop": 0.4, "seed": 7, "lengths": [4, 2]} | rounds | options

    def function(x, W_hh):
        return getattr(namespace, op)(x, W_ih, W_hh, b, h0, c0, **more)[0]

    return function, x, W_hh


COMPOSITIONS = {  # {name: (f, x, W) -> tensors}
    "vmap": lambda f, x, W: vmap(f, (0, None))(torch.stack([x, 2 * x]), W),
    "vmap of weights": lambda f, x, W: vmap(f, (None, 1))(x, torch.stack([W, -W, W + 1], 1)),
    "vmap of vmap": lambda f, x, W: vmap(vmap(f, (None, 0)), (0, None))(
        torch.stack([x, 2 * x]), torch.stack([W, -W, W + 1])
    ),
    "vmap of grad": lambda f, x, W: vmap(grad(lambda x, W: f(x, W).sin().sum(), (0, 1)), (0, None))(
        torch.stack([x, 2 * x]), W
    ),
    "grad of vmap": lambda f, x, W: grad(
        lambda W: vmap(f, (0, None))(torch.stack([x, 2 * x]), W).sin().sum()
    )(W),
    "vmap of grad of grad": lambda f, x, W: vmap(
        grad(lambda W: grad(lambda W: f(x, W).sin().sum())(W).square().sum())
    )(torch.stack([W, -W])),
    "jacobian": lambda f, x, W: jacrev(f, (0, 1))(x, W),
}


@pytest.mark.parametrize("op", ["lstm", "mogrifier_lstm"])
@pytest.mark.parametrize("name", COMPOSITIONS)
def test_batches_of_recurrences(op, name):
    compose = COMPOSITIONS[name]
    torch.testing.assert_close(
        compose(*recurrent_call(op)), compose(*recurrent_call(op, reference))
    )


@pytest.mark.parametrize("op", ["lstm", "mogrifier_lstm"])
@pytest.mark.parametrize("name", [name for name in COMPOSITIONS if "grad of grad" not in name])
def test_batches_of_recurrences_run_the_kernels(op, name, monkeypatch):
    """One element after the other; second derivatives alone need the oracle."""
    module = {"lstm": recurrent_cell}.get(op, importlib.import_module(f"fusedseq.fused.{op}"))
    monkeypatch.setattr(module, "call_reference", lambda *_: pytest.fail("called the oracle"))
    COMPOSITIONS[name](*recurrent_call(op))


@pytest.mark.parametrize("op", ["lstm", "mogrifier_lstm", "gru"])
def test_an_empty_batch_has_empty_results(op):
    module = {"lstm": nn.LSTM, "mogrifier_lstm": nn.MogrifierLSTM, "gru": nn.GRU}[op](5, 3)
    parameters = {name: p.detach() for name, p in module.named_parameters()}
    x, lengths = torch.ones(4, 0, 2, 5), torch.ones(0, 2, dtype=torch.int64)  # (T, empty, B, X)

    def loss(parameters, x, lengths):
        return functional_call(module, parameters, (x, None, lengths))[0].sum()

    y, _ = vmap(lambda x, lengths: module(x, lengths=lengths), (1, 0))(x, lengths)
    assert y.shape == (0, 4, 2, 3)
    y.sum().backward()
    assert all(p.grad is not None and not p.grad.any() for p in module.parameters())
    gradients = vmap(grad(loss), (None, 1, 0))(parameters, x, lengths)
    assert {name: g.shape for name, g in gradients.items()} == {
        name: (0, *p.shape) for name, p in parameters.items()
    }


def test_a_batch_of_gradients_of_a_recorded_call():
    """torch.autograd.grad(is_grads_batched=True) runs a recorded backward under vmap."""
    f, x, W = recurrent_call("lstm")
    W.requires_grad_()
    y = f(x, W)
    cotangents = torch.randn(3, *y.shape, dtype=y.dtype)
    (found,) = torch.autograd.grad(y, W, cotangents, retain_graph=True, is_grads_batched=True)
    for g, dW in zip(cotangents, found, strict=True):
        torch.testing.assert_close(dW, *torch.autograd.grad(y, W, g, retain_graph=True))


def test_vmap_of_a_call_that_autograd_records():
    f, x, W = recurrent_call("lstm")
    batch, W = torch.stack([x, 2 * x]), W.requires_grad_()
    (found,) = torch.autograd.grad(vmap(f, (0, None))(batch, W).sin().sum(), W)
    (wanted,) = torch.autograd.grad(sum(f(x, W).sin().sum() for x in batch), W)
    torch.testing.assert_close(found, wanted)
