"""Properties that every operator has, tested on the case table `fusedseq.testing.CASES`.

Results and gradients agree with the oracle's within the error budget, in every dtype, for inputs of
any layout, with any number of threads and any subset of inputs that require a gradient. Further:
finite differences, second derivatives, determinism, memory that is not written or not read, the
registration (opcheck, meta tensors), and autocast.
"""

import pytest
import torch
from fusedseq import fused, reference
from fusedseq.fused import autocast
from fusedseq.testing import CASES, CONSTANTS, check, convert, differentiable, names, run
from torch.autograd import gradcheck, gradgradcheck
from torch.utils._pytree import tree_leaves, tree_map

from tests.support.recorder import Recorder

pytestmark = pytest.mark.sampled(3)  # Triton's interpreter takes seconds for many cases


def cases(predicate=lambda case: True):
    """Parametrizes a test with the cases that the predicate accepts."""
    selected = [case for case in CASES if predicate(case)]
    assert selected, "the predicate accepts no case"
    return pytest.mark.parametrize("case", selected, ids=str)


def floats(case):
    return differentiable(*case.inputs())


def elements(case):
    return sum(t.numel() for t in floats(case))


def one_of_each(*more):
    """One small case of each operator with gradients, and those whose id contains a word of `more`.

    The case with the longest id is taken: it has the most options.
    """
    longest = {case.op: case for case in CASES if floats(case) and elements(case) < 1000}
    for case in CASES:
        small = case.op in longest and elements(case) < 1000
        if small and len(case.id) > len(longest[case.op].id):
            longest[case.op] = case
    return cases(lambda case: case in longest.values() or any(word in str(case) for word in more))


def suits_gradcheck(case):
    """Small and differentiable, with a dense gradient: gradcheck accepts no sparse one."""
    return (
        case.smooth
        and "scale" not in case.id
        and "sparse" not in case.id
        and 0 < elements(case) < 600
    )


def has_double_backward(case):
    """Small; F.embedding has no double backward of a sparse gradient, nor without ids."""
    return 0 < elements(case) < 1000 and not (
        case.op == "embedding" and ("sparse" in case.id or "-0-" in str(case))
    )


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


@cases(suits_gradcheck)
def test_gradcheck(case, device):
    function, inputs = as_function(case, device)
    assert gradcheck(function, inputs, fast_mode=True)


@cases(lambda case: suits_gradcheck(case) and has_double_backward(case))
def test_gradgradcheck(case, device):
    function, inputs = as_function(case, device)
    assert gradgradcheck(function, inputs, fast_mode=True)


@cases(has_double_backward)
def test_double_backward_equals_the_oracle(case, device):
    """Also for ties and saturated gates, where finite differences do not approximate gradients."""
    results = []
    for ops in (fused, reference):
        args, kwargs = case.inputs(device, torch.float64)
        inputs = [t.requires_grad_() for t in differentiable(args, kwargs)]
        loss = sum(y.square().sum() for y in tree_leaves(getattr(ops, case.op)(*args, **kwargs)))
        grads = torch.autograd.grad(loss, inputs, create_graph=True)
        penalty = sum(g.square().sum() for g in grads)
        results.append(torch.autograd.grad(penalty, inputs, materialize_grads=True))
    for name, got, expected in zip(names(case.op, *case.inputs()), *results, strict=True):
        torch.testing.assert_close(got, expected, msg=lambda m, name=name: f"{name}: {m}")


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
def test_gradient_of_a_subset_of_results(case, outputs, device):
    args, kwargs = case.inputs(device)
    check(case.op, args, kwargs, outputs=outputs)


@cases(lambda case: case.op == "mogrifier_lstm_pair" and elements(case) < 1000)
@pytest.mark.parametrize(
    "outputs", [[0], [2], [3], [1, 5]], ids=["y", "c", "y of layer 2", "h, c of layer 2"]
)
def test_gradient_of_a_subset_of_the_results_of_two_layers(case, outputs, device):
    args, kwargs = case.inputs(device)
    check(case.op, args, kwargs, outputs=outputs)


@DIFFERENTIABLE
def test_gradient_of_a_sum(case, device, dtype):
    """The backward of sum() passes the operator a gradient of stride 0."""
    args, kwargs = case.inputs(device, dtype)
    check(case.op, args, kwargs, expanded=True)


def transposed(t):
    return t.transpose(0, -1).contiguous().transpose(0, -1) if t.dim() > 1 else strided(t)


def strided(t):
    return torch.stack([t, torch.zeros_like(t)], dim=-1)[..., 0] if t.dim() else t


def offset(t):
    """Contiguous, but at an offset in its storage that is not aligned for vector loads."""
    return torch.cat([t.new_zeros(1), t.flatten()])[1:].view(t.shape)


def expanded(t):
    return t[:1].expand_as(t) if t.dim() else t


def expanded_rows(t):
    return t[..., :1].expand_as(t) if t.dim() else t


@cases(lambda case: elements(case) < 20000)
def test_offset(case, device, dtype):
    """Inputs that are not aligned for vector loads."""
    check_views(case, offset, device, dtype)


@cases(lambda case: elements(case) < 20000)
@pytest.mark.parametrize("view", [transposed, strided, expanded])
def test_views(case, view, device):
    """Inputs of any strides, which are read in the same way in all dtypes."""
    check_views(case, view, device)


def check_views(case, view, device, dtype=torch.float32):
    if view is expanded and case.op.endswith(("cross_entropy", "varlen")):
        # With equal rows of W, or of k, the exact gradient of x, or of q, is zero, so no error is a
        # small part of it.
        view = expanded_rows
    # With equal rows or columns of a weight, gradients through its product's layer norm are only
    # rounding errors.
    as_they_are = (2,) if view is expanded and case.op.startswith("layer_norm") else ()

    def viewed(t):
        if not isinstance(t, torch.Tensor) or not t.numel() or t.dim() in as_they_are:
            return t
        # The rising numbers of cu_seqlens cannot be equal.
        rises = case.op == "attention_varlen" and not t.is_floating_point()
        return t if rises and view is expanded_rows else view(t)

    check(case.op, *tree_map(viewed, case.inputs(device, dtype)))


@cases()
def test_inputs_are_not_mutated_or_returned(case, device):
    args, kwargs = case.inputs(device)
    tensors = [t for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)]
    before = [t.clone() for t in tensors]
    results, _ = run(getattr(fused, case.op), args, kwargs)
    assert all(t._version == 0 and torch.equal(t, b) for t, b in zip(tensors, before, strict=True))
    storages = {t.untyped_storage().data_ptr() for t in tensors if t.numel()}
    assert all(y.untyped_storage().data_ptr() not in storages for y in results if y.numel()), (
        "a result shares the memory of an input"
    )


@cases()
def test_deterministic(case, device, dtype):
    """Two calls give the same bits."""
    (y1, g1), (y2, g2) = (
        run(getattr(fused, case.op), *case.inputs(device, dtype)) for _ in range(2)
    )
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
    """Memory that torch allocates is filled with NaN."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


@cases(lambda case: elements(case) < 20000)
def test_uninitialised_memory_is_not_read(case, filled_with_nan, device, dtype):
    args, kwargs = case.inputs(device, dtype)
    assert not floats(case) or torch.empty(1, device=device).isnan()
    check(case.op, args, kwargs)


@one_of_each(
    "lstm-T1-B1",
    "lstm-T3-B0",
    "H7-nobias",
    "r1-rank2",
    "r0",
    "dropout-0x5-p0.5",
    "dropout_mask-2x3x5-p0.3",
)
def test_opcheck(case, filled_with_nan, device):
    """torch.library.opcheck of each registered operator that a forward and a backward call.

    It checks the schema and the fake and autograd implementations.
    """
    args, kwargs = case.inputs(device)
    with Recorder() as recorder:
        run(getattr(fused, case.op), args, kwargs)
    assert recorder.calls, f"{case.op} calls no operator of torch.ops.fusedseq"
    for function, *inputs in recorder.calls:
        fresh = tree_map(lambda t: t.detach().clone() if isinstance(t, torch.Tensor) else t, inputs)
        if "backward" not in function.name():
            for t in differentiable(*fresh):
                t.requires_grad_()
        torch.library.opcheck(function, *fresh)


@one_of_each()
def test_meta_tensors(case, device):
    """Meta tensors give results of the shapes, dtypes and strides that real tensors give."""

    def layouts(args, kwargs):
        results = tree_leaves(getattr(fused, case.op)(*args, **kwargs))
        return [(y.shape, y.dtype, y.stride()) for y in results]

    inputs = case.inputs(device)
    assert layouts(*convert(inputs, "meta")) == layouts(*inputs)


# Operators with matrix products: under autocast they convert their inputs.
RECURRENT = "gru", "layer_norm_gru", "layer_norm_lstm", "lstm", "mogrifier_lstm"
RECURRENT += "bidirectional_lstm", "mogrifier_lstm_pair", "peephole_lstm", "rnn"
RECURRENT += ("projected_lstm",)
ATTENTION = "attention", "attention_varlen"
AUTOCAST = *ATTENTION, "linear", "linear_cross_entropy", "split_cross_entropy", *RECURRENT


@cases(lambda case: floats(case) and elements(case) < 1000 and "input_dropout" not in case.id)
def test_autocast(case, device):
    """Operators with products run in the autocast dtype, all others in the dtype of their input.

    Input dropout is left out: it is an operator without products in front of the recurrence, so it
    runs in the wider dtype.
    """
    args, kwargs = case.inputs(device)
    with torch.autocast(device, dtype=torch.bfloat16):
        results, grads = run(getattr(fused, case.op), args, kwargs)
    assert all(g.dtype == torch.float32 for g in grads)
    cast = convert((args, kwargs), dtype=torch.bfloat16) if case.op in AUTOCAST else (args, kwargs)
    cast[1].update({name: value for name, value in kwargs.items() if name in CONSTANTS})
    expected, expected_grads = run(getattr(fused, case.op), *cast)
    for y, expected_y in zip(results, expected, strict=True):
        assert y.dtype == expected_y.dtype
        assert torch.equal(y, expected_y)
    for g, expected_g in zip(grads, expected_grads, strict=True):
        assert torch.equal(dense(g), dense(expected_g).float())


@pytest.mark.parametrize("wide", [torch.float16, torch.float32], ids=str)
def test_autocast_casts_every_floating_dtype_but_fp64_as_torch_does(wide, device):
    x, W, b = (torch.randn(shape, device=device) for shape in ((3, 5), (4, 5), (4,)))
    with torch.autocast(device, dtype=torch.bfloat16):
        mixed = x.to(wide), W.bfloat16(), b.half()
        expected = torch.nn.functional.linear(*mixed)
        found = fused.linear(*mixed)
        kept = fused.linear(x.double(), W.double(), b.double())
    assert found.dtype == expected.dtype == torch.bfloat16
    assert kept.dtype == torch.float64
    assert torch.equal(found, fused.linear(*(t.bfloat16() for t in mixed)))
    assert not autocast.is_cast(torch.zeros(1, dtype=torch.int64))


@pytest.mark.cpu
@pytest.mark.parametrize(
    "kind", ["cpu", "cuda", "hpu", "lazy", "meta", "mps", "mtia", "vulkan", "xla", "xpu"]
)
def test_device_types_without_autocast(kind):
    """The list agrees with torch, which raises an error for the others."""
    assert (kind in autocast.WITHOUT_AUTOCAST) != torch.amp.is_autocast_available(kind)
    assert not autocast.is_on(kind)
