"""Every property of every operator, on every case of `fusedseq.testing`."""

import pytest
import torch
from fusedseq import fused, reference
from fusedseq.testing import CASES, CONSTANTS, check, convert, differentiable, names, run
from torch.autograd import gradcheck, gradgradcheck
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map


def cases(predicate=lambda case: True):
    chosen = [case for case in CASES if predicate(case)]
    assert chosen, "no case chosen"
    return pytest.mark.parametrize("case", chosen, ids=str)


def floats(case):
    return differentiable(*case.inputs())


def elements(case):
    return sum(t.numel() for t in floats(case))


def one_of_each(*more):
    """The case with the most options of each operator that has gradients, and the ones whose id contains `more`."""
    rich = {case.op: case for case in CASES if floats(case) and elements(case) < 1000}
    for case in CASES:
        if case.op in rich and elements(case) < 1000 and len(case.id) > len(rich[case.op].id):
            rich[case.op] = case
    return cases(lambda case: case in rich.values() or any(word in str(case) for word in more))


def smooth(case):
    """Where finite differences mean something; gradcheck takes no sparse gradient."""
    return case.smooth and "scale" not in case.id and "sparse" not in case.id and 0 < elements(case) < 600


def twice(case):
    """Small, with a double backward: F.embedding's has none of a sparse gradient, nor of no ids."""
    return 0 < elements(case) < 1000 and not (case.op == "embedding" and ("sparse" in case.id or "-0-" in str(case)))


DIFFERENTIABLE = cases(lambda c: floats(c) and elements(c) < 1000)


@cases()
def test_matches_the_oracle(case, device, dtype):
    args, kwargs = case.inputs(device, dtype)
    check(case.op, args, kwargs)


@cases(lambda case: floats(case))
def test_matches_the_oracle_without_gradients(case, device, dtype):
    args, kwargs = case.inputs(device, dtype)
    with torch.no_grad():
        check(case.op, args, kwargs, backward=False)
    with torch.inference_mode():
        check(case.op, args, kwargs, backward=False)


def as_function(case, device):
    """The fused operator as a function of its float inputs alone, and these inputs in fp64."""
    args, kwargs = case.inputs(device, torch.float64)
    inputs = [t.requires_grad_() for t in differentiable(args, kwargs)]

    def function(*tensors):
        given = {id(old): new for old, new in zip(inputs, tensors, strict=True)}
        a, k = tree_map(lambda t: given.get(id(t), t), (args, kwargs))
        return tuple(tree_leaves(getattr(fused, case.op)(*a, **k)))

    return function, inputs


@cases(smooth)
def test_gradcheck(case, device):
    function, inputs = as_function(case, device)
    assert gradcheck(function, inputs, fast_mode=True)


@cases(lambda case: smooth(case) and twice(case))
def test_gradgradcheck(case, device):
    function, inputs = as_function(case, device)
    assert gradgradcheck(function, inputs, fast_mode=True)


@cases(twice)
def test_double_backward_equals_the_oracle(case, device):
    """Also where finite differences say nothing: ties and saturated gates."""
    results = []
    for ops in (fused, reference):
        args, kwargs = case.inputs(device, torch.float64)
        inputs = [t.requires_grad_() for t in differentiable(args, kwargs)]
        loss = sum(y.square().sum() for y in tree_leaves(getattr(ops, case.op)(*args, **kwargs)))
        grads = torch.autograd.grad(loss, inputs, create_graph=True)
        penalty = sum(g.square().sum() for g in grads)
        results.append(torch.autograd.grad(penalty, inputs, materialize_grads=True))
    for name, got, wanted in zip(names(case.op, *case.inputs()), *results, strict=True):
        torch.testing.assert_close(got, wanted, msg=lambda m, name=name: f"{name}: {m}")


@DIFFERENTIABLE
def test_each_input_alone_requires_grad(case, device):
    args, kwargs = case.inputs(device)
    for i in range(len(differentiable(args, kwargs))):
        check(case.op, args, kwargs, needs=[i])


@cases(lambda case: floats(case))
def test_no_graph_without_requires_grad(case, device):
    args, kwargs = case.inputs(device)
    assert not any(y.requires_grad for y in tree_leaves(getattr(fused, case.op)(*args, **kwargs)))


@cases(lambda case: case.op in ("lstm", "mogrifier_lstm") and elements(case) < 10000)
@pytest.mark.parametrize("outputs", [[0], [1], [2], [1, 2]], ids=["y", "h", "c", "hc"])
def test_gradient_of_some_results(case, outputs, device):
    args, kwargs = case.inputs(device)
    check(case.op, args, kwargs, outputs=outputs)


@cases(lambda case: case.op == "mogrifier_lstm_pair" and elements(case) < 1000)
@pytest.mark.parametrize("outputs", [[0], [2], [3], [1, 5]], ids=["y", "c", "y of the second", "h, c of the second"])
def test_gradient_of_some_results_of_two_layers(case, outputs, device):
    args, kwargs = case.inputs(device)
    check(case.op, args, kwargs, outputs=outputs)


@DIFFERENTIABLE
def test_gradient_of_a_sum(case, device, dtype):
    """sum() hands the operator a gradient of stride 0."""
    args, kwargs = case.inputs(device, dtype)
    check(case.op, args, kwargs, expanded=True)


def transposed(t):
    return t.transpose(0, -1).contiguous().transpose(0, -1) if t.dim() > 1 else strided(t)


def strided(t):
    return torch.stack([t, torch.zeros_like(t)], dim=-1)[..., 0] if t.dim() else t


def offset(t):
    """Contiguous, but not where its storage begins, and not aligned for vector loads."""
    return torch.cat([t.new_zeros(1), t.flatten()])[1:].view(t.shape)


def expanded(t):
    return t[:1].expand_as(t) if t.dim() else t


def expanded_rows(t):
    return t[..., :1].expand_as(t) if t.dim() else t


@cases(lambda case: elements(case) < 20000)
@pytest.mark.parametrize("view", [transposed, strided, offset, expanded])
def test_views(case, view, device, dtype):
    if view is expanded and case.op.endswith("cross_entropy"):
        view = expanded_rows  # equal classes have a gradient of zero for x, of which no error is a small part
    viewed = tree_map(lambda t: view(t) if isinstance(t, torch.Tensor) and t.numel() else t, case.inputs(device, dtype))
    check(case.op, *viewed)


@cases()
def test_inputs_are_not_mutated(case, device):
    args, kwargs = case.inputs(device)
    tensors = [t for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)]
    before = [t.clone() for t in tensors]
    results, _ = run(getattr(fused, case.op), args, kwargs)
    assert all(t._version == 0 and torch.equal(t, b) for t, b in zip(tensors, before, strict=True))
    storages = {t.untyped_storage().data_ptr() for t in tensors if t.numel()}
    assert all(y.untyped_storage().data_ptr() not in storages for y in results if y.numel()), "a result is an input"


@cases()
def test_deterministic(case, device, dtype):
    (y1, g1), (y2, g2) = (run(getattr(fused, case.op), *case.inputs(device, dtype)) for _ in range(2))
    assert all(torch.equal(dense(a), dense(b)) for a, b in zip(y1 + g1, y2 + g2, strict=True))


def dense(t):
    return t.to_dense() if t.is_sparse else t


@pytest.mark.cpu
@cases(lambda case: elements(case) >= 100)
def test_any_number_of_threads(case, threads, device, dtype):
    args, kwargs = case.inputs(device, dtype)
    for count in (2, 3) if elements(case) > 1000 else (2,):
        threads(count)
        check(case.op, args, kwargs)


@pytest.fixture
def filled_with_nan():
    """New memory is NaN until it is written, where torch allocates it."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


@cases(lambda case: elements(case) < 20000)
def test_unwritten_memory_is_not_read(case, filled_with_nan, device, dtype):
    args, kwargs = case.inputs(device, dtype)
    assert not floats(case) or torch.empty(1, device=device).isnan()
    check(case.op, args, kwargs)


class Recorder(TorchDispatchMode):
    """Collects the calls of fusedseq's registered operators, whose schemas the tests need not know."""

    def __init__(self):
        super().__init__()
        self.calls = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function.namespace == "fusedseq":
            self.calls.append((function, args, kwargs or {}))
        return function(*args, **(kwargs or {}))


@one_of_each("lstm-T1-B1", "lstm-T3-B0", "H7-nobias", "r1-rank2", "r0", "dropout-0x5-p0.5", "dropout_mask-2x3x5-p0.3")
def test_opcheck(case, filled_with_nan, device):
    """The schema, fake and autograd implementations of each registered operator the call runs, backward included."""
    args, kwargs = case.inputs(device)
    with Recorder() as recorder:
        run(getattr(fused, case.op), args, kwargs)
    assert recorder.calls, f"{case.op} runs no operator of torch.ops.fusedseq"
    for function, *inputs in recorder.calls:
        fresh = tree_map(lambda t: t.detach().clone() if isinstance(t, torch.Tensor) else t, inputs)
        if "backward" not in function.name():
            for t in differentiable(*fresh):
                t.requires_grad_()
        torch.library.opcheck(function, *fresh)


@one_of_each()
def test_meta_tensors(case, device):
    """Shapes, dtypes and strides without data, as a FakeTensorMode or `device="meta"` asks for them."""
    args, kwargs = case.inputs(device)
    wanted = tree_leaves(getattr(fused, case.op)(*args, **kwargs))
    args, kwargs = convert((args, kwargs), "meta")
    got = tree_leaves(getattr(fused, case.op)(*args, **kwargs))
    assert [(y.shape, y.dtype, y.stride()) for y in got] == [(y.shape, y.dtype, y.stride()) for y in wanted]


@cases(lambda case: floats(case) and elements(case) < 1000 and "input_dropout" not in case.id)
def test_autocast(case, device):
    """The recurrent operators run in the autocast dtype and give it; the others keep the dtype of their input.

    (An input dropout is one of the others, on the way to the recurrence: in the wider dtype.)
    """
    low = torch.bfloat16
    args, kwargs = case.inputs(device)
    with torch.autocast(device, dtype=low):
        results, grads = run(getattr(fused, case.op), args, kwargs)
    assert all(g.dtype == torch.float32 for g in grads)
    products = case.op in (
        "attention",
        "linear",
        "linear_cross_entropy",
        "lstm",
        "mogrifier_lstm",
        "mogrifier_lstm_pair",
        "split_cross_entropy",
    )
    cast = convert((args, kwargs), dtype=low) if products else (args, kwargs)
    cast[1].update({name: value for name, value in kwargs.items() if name in CONSTANTS})
    wanted, wanted_grads = run(getattr(fused, case.op), *cast)
    for got, want in zip(results, wanted, strict=True):
        assert got.dtype == want.dtype
        assert torch.equal(got, want)
    for got, want in zip(grads, wanted_grads, strict=True):
        assert torch.equal(dense(got), dense(want).float())
