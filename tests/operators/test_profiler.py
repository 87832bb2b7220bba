"""What torch.profiler and printed graphs show of the operators."""

import pytest
import torch
from fusedseq import fused
from fusedseq.fused import autograd
from fusedseq.nn.heads import heads
from fusedseq.testing import CASES, differentiable
from torch.profiler import ProfilerActivity, profile
from torch.utils._pytree import tree_leaves

pytestmark = pytest.mark.cpu

# Operators that compute by others: {operator: the one that is shown}
SHOWN_AS = {
    "attention_varlen": "attention",
    "mogrifier_lstm_pair": "mogrifier_lstm",
    "split_cross_entropy": "linear_cross_entropy",
}


def first_case(op):
    """Inputs with nothing of size 0, and of dropout not with p = 0, which computes nothing."""
    for case in CASES:
        if case.op == op and "p0" not in case.id.split("-"):
            args, kwargs = case.inputs()
            inputs = differentiable(args, kwargs)
            if inputs and all(t.numel() for t in inputs):
                for t in inputs:
                    t.requires_grad_()
                return args, kwargs
    raise LookupError(op)


def names_of_a_step(op):
    """{name in a profile of one forward and backward pass: calls}, and the node of the backward."""
    args, kwargs = first_case(op)
    with profile(activities=[ProfilerActivity.CPU]) as profiled:
        results = tree_leaves(getattr(fused, op)(*args, **kwargs))
        results = [t for t in results if isinstance(t, torch.Tensor) and t.requires_grad]
        # A factor, because a loss whose own gradient is one calls no operator in backward.
        sum(2 * t.sum() for t in results).backward()
    return {event.key: event.count for event in profiled.key_averages()}, results[0].grad_fn.name()


@pytest.mark.parametrize("op", sorted({case.op for case in CASES} - {"dropout_mask"}))
def test_a_profile_names_the_operator(op):
    names, _ = names_of_a_step(op)
    shown = SHOWN_AS.get(op, op)
    assert f"fusedseq::{shown}" in names
    # The backward is OP_backward or OP_scale; that of dropouts is the operator itself.
    assert sum(n for name, n in names.items() if name.startswith(f"fusedseq::{shown}")) >= 2


RECORDED = ["linear", "attention", "mogrifier_lstm", "residual_layer_norm", "linear_cross_entropy"]


@pytest.mark.parametrize("op", RECORDED)
@pytest.mark.parametrize("language", ["C++", "Python"])
def test_a_node_has_the_name_of_its_operator(op, language, monkeypatch):
    if language == "Python":
        monkeypatch.setattr(autograd, "_recorded", {})
        monkeypatch.setattr(autograd, "recorder", None)
    elif not autograd.recorder:
        pytest.skip("the module that records in C++ was not built")
    names, node = names_of_a_step(op)
    wanted = f"Fusedseq{op.title().replace('_', '')}Backward"
    assert node == wanted
    assert wanted in names


def test_a_printed_result_shows_its_operator():
    y = fused.linear(torch.randn(2, 3, requires_grad=True), torch.randn(4, 3))
    assert "grad_fn=<FusedseqLinearBackward" in repr(y)
    y.sum().backward()
    assert y.grad_fn.name() == "FusedseqLinearBackward"  # its saved tensors are gone


@pytest.mark.parametrize("language", ["C++", "Python"])
def test_a_node_that_splits_heads_has_a_name(language, monkeypatch):
    if language == "Python":
        monkeypatch.setattr(autograd, "recorder", None)
    q, k, v = heads(torch.randn(2, 3, 24, requires_grad=True), 3, 2, batch_first=True)
    assert q.grad_fn.name() == k.grad_fn.name() == v.grad_fn.name() == "FusedseqHeadsBackward"
