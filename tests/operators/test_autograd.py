"""The two implementations of autograd for operators with short calls.

fusedseq._autograd records a call in C++, fused/autograd.py in Python. Both must give the same bits;
further tests say which calls are recorded in C++, and check what autograd promises: saved tensors
may not be modified, hooks see them, the graph is freed, errors keep their class.
"""

import copy
import gc
import weakref

import pytest
import torch
from fusedseq import _load, fused, reference
from fusedseq.fused import autograd
from fusedseq.nn.heads import heads
from fusedseq.testing import CASES, convert, differentiable, run
from torch.utils.checkpoint import checkpoint

SMALL = (
    "activation_regularization",
    "attention",
    "attention_plain",
    "bias_activation_dropout",
    "bidirectional_lstm",
    "dropout",
    "embedding",
    "gru",
    "layer_norm_gru",
    "layer_norm_lstm",
    "linear",
    "linear_cross_entropy",
    "locked_dropout",
    "lstm",
    "mogrifier_lstm",
    "peephole_lstm",
    "projected_lstm",
    "residual_layer_norm",
    "rnn",
    "weight_drop",
)
# Sparse gradients are always recorded in Python.
RECORDED = [case for case in CASES if case.op in SMALL and not case.id.endswith("sparse")]
LINEAR = torch.ones(3, 4), torch.ones(5, 4), torch.ones(5)
recorded = pytest.mark.skipif(
    autograd.recorder is None, reason="fusedseq._autograd is for another torch or Python"
)


@pytest.fixture
def in_python(monkeypatch):
    """A function after whose call operators are recorded in Python."""

    def send():
        monkeypatch.setattr(autograd, "_recorded", {})
        monkeypatch.setattr(autograd, "recorder", None)

    return send


def leaves(*tensors):
    return [t.detach().clone().requires_grad_() for t in tensors]


def test_a_build_for_this_torch_records_in_cpp():
    built = _load.build_info()["torch"].partition("+")[0]
    assert (autograd.recorder is not None) == (built == torch.__version__.partition("+")[0])
    assert sorted(autograd._recorded) == (sorted(SMALL) if autograd.recorder else [])


@recorded
@pytest.mark.parametrize("case", RECORDED, ids=str)
@pytest.mark.parametrize("number", [torch.float32, torch.bfloat16], ids=["f32", "bf16"])
def test_cpp_and_python_give_the_same_bits(case, number, in_python):
    args, kwargs = case.inputs(dtype=number)
    count = len(differentiable(args, kwargs))
    few = [*range(count)], [0], [count - 1], []  # the inputs that need a gradient
    function = getattr(fused, case.op)
    calls = [
        lambda needs=needs: run(function, *copy.deepcopy((args, kwargs)), needs) for needs in few
    ]
    got = [call() for call in calls]
    in_python()
    for (results, grads), call in zip(got, calls, strict=True):
        wanted = call()
        for a, b in zip(results + grads, wanted[0] + wanted[1], strict=True):
            assert torch.equal(a, b) or (
                torch.equal(a.isnan(), b.isnan()) and torch.equal(a.nan_to_num(), b.nan_to_num())
            )
            assert (a.dtype, a.shape) == (b.dtype, b.shape)


@recorded
@pytest.mark.parametrize(
    "upstream", [(True, False), (False, True), (True, True)], ids=["y", "s", "both"]
)
@pytest.mark.parametrize("p", [0.0, 0.4])
def test_gradients_of_each_result_of_prenorm(upstream, p, in_python):
    inputs = [torch.randn(4, 6), torch.randn(4, 6), torch.randn(6), torch.randn(6)]

    def grads():
        given = leaves(*inputs)
        results = fused.residual_layer_norm(*given, p=p, prenorm=True, seed=3)
        used = [y for y, wanted in zip(results, upstream, strict=True) if wanted]
        return torch.autograd.grad(
            used, given, [torch.full_like(y, 0.7) for y in used], materialize_grads=True
        )

    got = grads()
    in_python()
    assert all(torch.equal(a, b) for a, b in zip(got, grads(), strict=True))


@recorded
@pytest.mark.parametrize("details", [(0,), (1,), (2,), (0, 1, 2)], ids=str)
def test_gradients_of_the_details_of_cross_entropy(details, in_python):
    inputs, target = [torch.randn(7, 4), torch.randn(9, 4), torch.randn(9)], torch.arange(7)

    def grads():
        x, W, b = given = leaves(*inputs)
        found = fused.linear_cross_entropy(x, W, target, b, return_details=True)
        return torch.autograd.grad(sum((i + 1) * found[i].sum() for i in details), given)

    got = grads()
    in_python()
    assert all(torch.equal(a, b) for a, b in zip(got, grads(), strict=True))


def test_second_derivatives_equal_the_oracles():
    def second(op):
        given = leaves(*LINEAR)
        y = op.linear(*given).sin()
        (first,) = torch.autograd.grad(y.sum(), given[0], create_graph=True)
        return torch.autograd.grad(first.square().sum(), given)

    for a, b in zip(second(fused), second(reference), strict=True):
        torch.testing.assert_close(a, b)


@recorded
def test_the_weight_of_an_embedding_may_change_before_its_backward():
    """Its gradient does not depend on it: an optimizer may step first."""
    W = torch.randn(5, 3, requires_grad=True)
    y = fused.embedding(torch.tensor([1, 4, 1]), W)
    assert y.grad_fn.name() == "FusedseqEmbeddingBackward"
    with torch.no_grad():
        W.zero_()
    y.sum().backward()
    assert W.grad[:, 0].tolist() == [0, 2, 0, 0, 1]


def test_hooks_of_saved_tensors_get_no_tensor_without_data():
    W = torch.randn(5, 3, requires_grad=True)
    with torch.autograd.graph.save_on_cpu():
        y = fused.embedding(torch.tensor([1, 4, 1]), W, p=0.5, seed=3)
    (second,) = torch.autograd.grad(y.square().sum(), W, create_graph=True)
    (found,) = torch.autograd.grad(second.sum(), W)
    V = W.detach().requires_grad_()
    y = reference.embedding(torch.tensor([1, 4, 1]), V, p=0.5, seed=3)
    (first,) = torch.autograd.grad(y.square().sum(), V, create_graph=True)
    torch.testing.assert_close(second, first)
    torch.testing.assert_close(found, *torch.autograd.grad(first.sum(), V))


@recorded
def test_none_and_huge_numbers_are_left_to_python():
    """None in place of a bool is not optional, and an int may be too large for a double."""
    x, seed = torch.ones(2, 3), torch.tensor(1)
    assert autograd._recorded["weight_drop"](x, 0.5, seed, None) is NotImplemented
    assert autograd._recorded["dropout"](x, 10**400, seed) is NotImplemented
    with pytest.raises(ValueError, match=r"^dropout: p must be in \[0, 1\]"):
        fused.dropout(x, 10**400, 1)


def test_saved_tensors_may_not_be_modified_and_are_freed():
    x, W, b = leaves(*LINEAR)
    y = fused.linear(x, W, b)
    with torch.no_grad():
        W.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()
    y = fused.linear(x, W, b).sum()
    y.backward(retain_graph=True)
    first = x.grad.clone()
    y.backward()
    assert torch.equal(x.grad, 2 * first)
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        y.backward()


def test_inputs_are_freed_with_the_graph():
    x = torch.randn(3, 4, requires_grad=True)
    inner = x * 2
    alive = weakref.ref(inner)
    y = fused.residual_layer_norm(inner, inner.detach().clone())
    del inner
    y.sum().backward()
    del y
    gc.collect()
    assert alive() is None


def test_saved_tensor_hooks_are_called():
    seen = []
    given = leaves(*LINEAR)
    with torch.autograd.graph.saved_tensors_hooks(
        lambda t: seen.append(t.shape) or t.clone(), lambda t: t
    ):
        y = fused.linear(*given)
    grads = torch.autograd.grad(y.sum(), given)
    assert {given[0].shape, given[1].shape} <= {*seen}
    assert all(
        torch.equal(a, b)
        for a, b in zip(grads, torch.autograd.grad(fused.linear(*given).sum(), given), strict=True)
    )


def test_checkpointing_recomputes():
    given = leaves(*LINEAR)
    wanted = torch.autograd.grad(fused.linear(*given).square().sum(), given)
    got = torch.autograd.grad(
        checkpoint(fused.linear, *given, use_reentrant=False).square().sum(), given
    )
    assert all(torch.equal(a, b) for a, b in zip(got, wanted, strict=True))


class Named(torch.Tensor):
    pass


@recorded
def test_tensor_subclasses_are_recorded_in_python():
    x, W, b = LINEAR
    operator = autograd._recorded["linear"]
    assert operator(x.as_subclass(Named), W, b) is NotImplemented
    assert operator(x, W) is NotImplemented  # torch raises for a wrong number of arguments
    assert type(fused.linear(x.as_subclass(Named), W, b)) is Named
    with torch.device("cpu"):  # a TorchFunctionMode, which intercepts every function
        assert operator(x, W, b) is NotImplemented
        assert torch.equal(fused.linear(x, W, b), fused.linear(*LINEAR))


@recorded
def test_without_gradients_nothing_is_recorded():
    x, W, b = leaves(*LINEAR)
    with torch.no_grad():
        assert fused.linear(x, W, b).grad_fn is None
    assert fused.linear(*LINEAR).grad_fn is None
    with torch.inference_mode():
        assert fused.linear(x, W, b).is_inference()
    assert fused.linear(x, W, b).requires_grad


@recorded
@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("parts", [2, 3])
def test_heads_in_cpp_and_python_give_the_same_bits(parts, batch_first, in_python):
    y = torch.randn(4, 5, parts * 6)
    used = range(parts), [0], [parts - 1]

    def grads():
        found = []
        for which in used:
            (given,) = leaves(y)
            views = heads(given, parts, 2, batch_first)
            assert all(v._base is not None or v.grad_fn is not None for v in views)
            found += torch.autograd.grad(sum((i + 1) * views[i].sin().sum() for i in which), given)
        (given,) = leaves(y)
        q, *others = heads(given, parts, 2, batch_first)
        return [
            *found,
            *torch.autograd.grad(fused.attention(q, others[0], others[-1]).sin().sum(), given),
        ]

    got = grads()
    in_python()
    assert all(torch.equal(a, b) for a, b in zip(got, grads(), strict=True))


def test_a_build_for_another_torch_records_in_python(monkeypatch):
    monkeypatch.setattr(_load, "build_info", lambda: {"torch": "2.0.1+cpu"})
    assert _load.recorder.__wrapped__() is None
    monkeypatch.undo()
    monkeypatch.setenv("FUSEDSEQ_AUTOGRAD", "python")
    assert _load.recorder.__wrapped__() is None


def test_an_int_is_accepted_for_a_float():
    """An int is accepted for a float of the schema, as by torch.ops."""
    x, b = torch.randn(3, 4), torch.randn(4)
    (grad,) = torch.autograd.grad(
        fused.bias_activation_dropout(y := x.requires_grad_(), b, "gelu", 0, 5).sum(), y
    )
    assert grad.shape == x.shape
    for t in convert([x], dtype=torch.float64):
        assert fused.residual_layer_norm(t, eps=0, p=0).dtype == torch.float64


@recorded
def test_unchecked_calls_are_only_correct_ones():
    x, W, b = LINEAR
    assert torch.equal(autograd.unchecked("linear", x, W, b), fused.linear(x, W, b))
    halves = [t.half() for t in LINEAR]
    faults = [
        (x, W, b.double()),
        (x, W.T, b),
        (x, W, b[:2]),
        (x, W, b[None]),
        (5, W, b),
        (x, None, b),
        (x.long(), W, b),
        halves,
    ]
    for inputs in faults:
        assert autograd.unchecked("linear", *inputs) is NotImplemented
    with torch.autocast("cpu"):
        assert autograd.unchecked("linear", x, W, b) is NotImplemented
    norm = x, x, W[0], W[1], 0.5, 1e-5, False, 7
    y = autograd.unchecked("residual_layer_norm", *norm)[0]
    assert torch.equal(y, fused.residual_layer_norm(*norm[:4], p=0.5, seed=torch.tensor(7)))
    for place, fault in {1: b, 2: x, 3: b, 4: 1.5, 5: -1.0, 6: 1, 7: 2**80}.items():
        assert (
            autograd.unchecked("residual_layer_norm", *norm[:place], fault, *norm[place + 1 :])
            is NotImplemented
        )
    for fault in (
        (x, b, "relu", 0.0, 7),
        (x, W[0], "silu", 0.0, 7),
        (x, W[0], "relu", -0.1, 7),
        (x, W[0], "relu", 0.0, x),
    ):
        assert autograd.unchecked("bias_activation_dropout", *fault) is NotImplemented


@recorded
def test_unchecked_random_masks_are_only_correct_calls():
    x = torch.ones(2, 3, 4)
    wrong_seeds = torch.tensor([1, 2]), torch.tensor(1.0), None, 2**80
    for op, good in (
        ("dropout", (x, 0.5, 7)),
        ("locked_dropout", (x, 0.5, 7)),
        ("weight_drop", (x[0], 0.5, 7, True)),
        ("embedding", (torch.tensor([1, 0]), x[0], 0.5, 7)),
    ):
        assert torch.equal(autograd.unchecked(op, *good), getattr(fused, op)(*good))
        at_p = 2 if op == "embedding" else 1
        faults = [(at_p, p) for p in (-0.5, 1.5, float("nan"), None)]
        faults += [(at_p + 1, seed) for seed in wrong_seeds]
        faults += [(at_p - 1, wrong) for wrong in (x.long(), x.half(), x.to("meta"), None, 5)]
        if op != "dropout":
            faults += [(at_p - 1, x[None])]
        if op == "weight_drop":
            faults += [(3, None)]
        if op == "embedding":
            words = [3, 1], [-1, 1]
            faults += [(0, torch.tensor(two)) for two in words]
            faults += [(0, torch.tensor([1, 0], dtype=torch.int32)), (0, None), (0, x)]
        for place, fault in faults:
            inputs = (*good[:place], fault, *good[place + 1 :])
            assert autograd.unchecked(op, *inputs) is NotImplemented, (op, place, fault)
    rows = torch.tensor([[0, 1, 0], [1, 0, 1]]).T  # not contiguous
    y = fused.embedding(rows, x[0])
    assert torch.equal(y, reference.embedding(rows, x[0]))


@recorded
@pytest.mark.parametrize("seed", [0, -1, 2**63 - 1, -(2**63), 2**63, 2**64 - 1], ids=str)
def test_a_seed_gives_the_same_mask_in_cpp_and_python(seed, in_python):
    x = torch.ones(64, 8)
    got = fused.bias_activation_dropout(x, None, "relu", 0.5, seed)
    in_python()
    assert torch.equal(got, fused.bias_activation_dropout(x, None, "relu", 0.5, seed))


@recorded
@pytest.mark.parametrize(
    "error",
    [ImportError("needs Triton"), torch.OutOfMemoryError("no memory")],
    ids=["import", "memory"],
)
def test_errors_of_a_kernel_keep_their_class(error):
    def kernel(*_):
        raise error

    library = torch.library.Library("fusedseq", "IMPL")
    library.impl("linear", kernel, "Meta", allow_override=True)  # as by default in torch 2.13
    try:
        with pytest.raises(type(error), match=str(error)):
            autograd._recorded["linear"](*(t.to("meta").requires_grad_() for t in LINEAR))
    finally:
        library._destroy()


@recorded
def test_errors_of_torch_keep_their_class():
    with pytest.raises(IndexError, match=r"^Dimension out of range"):
        autograd.recorder.heads(torch.ones(2), 3, 2, True)


def change_in_place(device):
    x, W = torch.randn(2, 3, 4, device=device), torch.randn(5, 4, device=device, requires_grad=True)
    y = fused.linear(x, W, torch.zeros(5, device=device))
    y.view(-1)[::2].mul_(2)
    y.sum().backward()
    factors = torch.tensor([2.0, 1.0], device=device).repeat(15).view(6, 5)
    torch.testing.assert_close(W.grad, factors.T @ x.view(6, 4))


def test_a_program_may_change_a_result_in_place():
    change_in_place("cpu")


@pytest.mark.triton
def test_a_program_may_change_a_result_of_torchs_product_in_place(device):
    change_in_place(device)
