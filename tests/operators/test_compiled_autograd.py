"""torch's compiled autograd: a backward pass with the operators' nodes is traced as one graph.
Its gradients are those of a backward pass as usual.
"""

import warnings
from contextlib import nullcontext

import pytest
import torch
from fusedseq import fused, nn
from fusedseq.testing import CASES, differentiable
from torch._dynamo import compiled_autograd
from torch.utils._pytree import tree_leaves


def first_cases():
    """The first case of each operator that has a dropout or other options, or its first one."""
    by_op = {}
    for case in CASES:
        leaves = differentiable(*case.inputs())
        if case.op == "dropout_mask" or not leaves or not all(leaf.numel() for leaf in leaves):
            continue
        if case.op not in by_op or ("drop" in case.id and "drop" not in by_op[case.op].id):
            by_op[case.op] = case
    return [*by_op.values()]


def total(results):
    return sum(y.sum() for y in tree_leaves(results) if y.requires_grad)


@pytest.mark.parametrize("case", first_cases(), ids=str)
def test_gradients_are_the_same(case):
    args, kwargs = case.inputs()
    leaves = [leaf.requires_grad_() for leaf in differentiable(args, kwargs)]
    function = getattr(fused, case.op)
    expected = torch.autograd.grad(total(function(*args, **kwargs)), leaves, allow_unused=True)
    compiler = torch.compile(backend="aot_eager", fullgraph=True)
    loss = total(function(*args, **kwargs))
    with compiled_autograd._enable(compiler):
        loss.backward()
    for leaf, gradient in zip(leaves, expected, strict=True):
        assert (leaf.grad is None) == (gradient is None)
        assert gradient is None or torch.equal(leaf.grad, gradient)


def test_a_model_with_projected_heads():
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.1, batch_first=True)
    x = torch.randn(2, 5, 16)

    def gradients(context):
        layer.zero_grad()
        torch.manual_seed(1)
        loss = layer(x).square().sum()
        with context:
            loss.backward()
        return [p.grad for p in layer.parameters()]

    compiler = torch.compile(backend="aot_eager", fullgraph=True)
    expected = gradients(nullcontext())
    with warnings.catch_warnings():
        warnings.filterwarnings("error", ".*may not alias")  # results that share memory
        found = gradients(compiled_autograd._enable(compiler))
    for gradient, wanted in zip(found, expected, strict=True):
        torch.testing.assert_close(gradient, wanted)


def test_a_graph_is_not_used_for_another_operator_or_option():
    x = torch.randn(4, 3, 8, requires_grad=True)
    compiler = torch.compile(backend="aot_eager", fullgraph=True)
    for function in (
        lambda: fused.dropout(x, p=0.5, seed=1),
        lambda: fused.locked_dropout(x, p=0.5, seed=1),
        lambda: fused.dropout(x, p=0.25, seed=1),
        lambda: fused.dropout(x, p=0.5, seed=2),
    ):
        (expected,) = torch.autograd.grad(function().sum(), x)
        loss = function().sum()
        with compiled_autograd._enable(compiler):
            loss.backward()
        assert torch.equal(x.grad, expected)
        x.grad = None
