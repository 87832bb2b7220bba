"""The two implementations of autograd for operators with short calls.

fusedseq._autograd records a call in C++, fused/autograd.py in Python. Both must give the same bits;
further tests say which calls are recorded in C++, and that errors keep their class.
"""

import copy

import pytest
import torch
from fusedseq import _load, fused, reference
from fusedseq.fused import autograd
from fusedseq.nn.heads import heads
from fusedseq.testing import CASES, convert, differentiable, run

from tests.support.autograd import LINEAR, leaves, recorded

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


@pytest.fixture
def in_python(monkeypatch):
    """A function after whose call operators are recorded in Python."""

    def send():
        monkeypatch.setattr(autograd, "_recorded", {})
        monkeypatch.setattr(autograd, "recorder", None)

    return send


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
def test_none_and_huge_numbers_are_left_to_python():
    """None in place of a bool is not optional, and an int may be too large for a double."""
    x, seed = torch.ones(2, 3), torch.tensor(1)
    assert autograd._recorded["weight_drop"](x, 0.5, seed, None) is NotImplemented
    assert autograd._recorded["dropout"](x, 10**400, seed) is NotImplemented
    with pytest.raises(ValueError, match=r"^dropout: p must be in \[0, 1\]"):
        fused.dropout(x, 10**400, 1)


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
def test_calls_that_cpp_checks_are_only_correct_ones():
    x, W, b = LINEAR
    assert torch.equal(autograd.call_if_valid("linear", x, W, b), fused.linear(x, W, b))
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
        assert autograd.call_if_valid("linear", *inputs) is NotImplemented
    with torch.autocast("cpu"):
        assert autograd.call_if_valid("linear", x, W, b) is NotImplemented
    norm = x, x, W[0], W[1], 0.5, 1e-5, False, 7
    y = autograd.call_if_valid("residual_layer_norm", *norm)[0]
    assert torch.equal(y, fused.residual_layer_norm(*norm[:4], p=0.5, seed=torch.tensor(7)))
    for place, fault in {1: b, 2: x, 3: b, 4: 1.5, 5: -1.0, 6: 1, 7: 2**80}.items():
        assert (
            autograd.call_if_valid("residual_layer_norm", *norm[:place], fault, *norm[place + 1 :])
            is NotImplemented
        )
    for fault in (
        (x, b, "relu", 0.0, 7),
        (x, W[0], "silu", 0.0, 7),
        (x, W[0], "relu", -0.1, 7),
        (x, W[0], "relu", 0.0, x),
    ):
        assert autograd.call_if_valid("bias_activation_dropout", *fault) is NotImplemented


@recorded
def test_calls_with_masks_that_cpp_checks_are_only_correct_ones():
    x = torch.ones(2, 3, 4)
    wrong_seeds = torch.tensor([1, 2]), torch.tensor(1.0), None, 2**80
    for op, good in (
        ("dropout", (x, 0.5, 7)),
        ("locked_dropout", (x, 0.5, 7)),
        ("weight_drop", (x[0], 0.5, 7, True)),
        ("embedding", (torch.tensor([1, 0]), x[0], 0.5, 7)),
    ):
        assert torch.equal(autograd.call_if_valid(op, *good), getattr(fused, op)(*good))
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
            assert autograd.call_if_valid(op, *inputs) is NotImplemented, (op, place, fault)
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
