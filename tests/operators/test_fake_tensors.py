"""Tensors without data (FakeTensor), and tracing by make_fx: results and gradients have the shapes,
dtypes and strides of a call with data, and the traced graph computes the same.
"""

import pytest
import torch
from fusedseq import fused
from fusedseq.testing import CASES, differentiable
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
)
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._pytree import tree_leaves, tree_map_only

OPERATORS = sorted({case.op for case in CASES} - {"dropout_mask"})  # which is not differentiable


def results_and_gradients(op, args, kwargs):
    leaves = [leaf.requires_grad_() for leaf in differentiable(args, kwargs)]
    results = [y for y in tree_leaves(getattr(fused, op)(*args, **kwargs)) if torch.is_tensor(y)]
    sums = [y.sum() for y in results if y.requires_grad]
    gradients = torch.autograd.grad(sums, leaves, allow_unused=True) if sums else ()
    return [*results, *gradients]


def layout(tensor, with_strides):
    if tensor is None:
        return None
    strides = tensor.stride() if with_strides and tensor.numel() else None
    return tensor.shape, tensor.dtype, tensor.device, strides


def needs_data(case):
    """Whether a call reads its arguments: the longest sequence if it is not given, and which rows
    a sparse gradient has.
    """
    reads_lengths = case.op == "attention_varlen" and "spare" not in case.id
    return reads_lengths or "sparse" in case.id


@pytest.mark.parametrize("case", CASES, ids=str)
def test_tensors_without_data(case):
    args, kwargs = case.inputs()
    expected = results_and_gradients(case.op, args, kwargs)
    with FakeTensorMode() as mode:
        fake = tree_map_only(torch.Tensor, mode.from_tensor, (args, kwargs))
        if needs_data(case):
            with pytest.raises((DataDependentOutputException, DynamicOutputShapeException)):
                results_and_gradients(case.op, *fake)
            return
        found = results_and_gradients(case.op, *fake)
    assert all(isinstance(tensor, FakeTensor) for tensor in found if tensor is not None)
    # The gradients of q, k and v that are parts of one tensor are parts of one only where it is
    # known that they are.
    with_strides = "projected" not in case.id
    assert [layout(t, with_strides) for t in found] == [layout(t, with_strides) for t in expected]


def test_packed_sequences_without_data():
    q, ends = torch.randn(7, 2, 8, requires_grad=True), torch.tensor([0, 3, 7])
    with FakeTensorMode() as mode:
        q, ends = mode.from_tensor(q), mode.from_tensor(ends)
        y = fused.attention_varlen(q, q, q, ends, ends, max_seqlen_q=4, max_seqlen_k=4)
        y.sum().backward()
    assert y.shape == q.grad.shape == (7, 2, 8)


def test_a_tensor_without_data_outside_of_its_mode():
    mode = FakeTensorMode()
    x, W, y = map(mode.from_tensor, (torch.randn(3, 4), torch.randn(5, 4), torch.tensor([0, 4, 2])))
    assert fused.linear_cross_entropy(x, W, y).shape == ()


@pytest.mark.parametrize("op", OPERATORS)
def test_make_fx(op):
    """Cases are traced until one has the operator in its graph, which p = 0 has not."""
    for case in (case for case in CASES if case.op == op and "-0" not in str(case)):
        args, kwargs = case.inputs()
        leaves = differentiable(args, kwargs)

        def call(*given, leaves=leaves, arguments=(args, kwargs)):
            places = {id(leaf): new for leaf, new in zip(leaves, given, strict=True)}
            return results_and_gradients(
                op, *tree_map_only(torch.Tensor, lambda t: places.get(id(t), t), arguments)
            )

        given = [leaf.detach() for leaf in leaves]
        graph = make_fx(call)(*given)
        for found, expected in zip(graph(*given), call(*given), strict=True):
            assert (found is None) == (expected is None)
            assert expected is None or torch.equal(found, expected)
        if any("fusedseq" in str(node.target) for node in graph.graph.nodes):
            return
    pytest.fail("no graph has the operator")
