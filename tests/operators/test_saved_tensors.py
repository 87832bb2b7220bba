"""What autograd promises of the tensors that an operator saves for backward.

They may not be modified, except where backward does not read them; hooks see them; the graph is
freed; and the gradients that a forward has computed are passed on without a copy where none is
needed.
"""

import gc
import weakref

import pytest
import torch
from fusedseq import fused, reference
from torch.utils.checkpoint import checkpoint

from tests.support.autograd import LINEAR, leaves, recorded
from tests.support.losses import inputs


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


@recorded
@pytest.mark.parametrize("of", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("factor", "kept"), [(1, False), (1, True), (3, False)])
def test_gradients_are_copied_only_where_needed(of, factor, kept):
    """The gradients that were computed with the loss are given away unless they change or are kept
    for another backward.
    """
    x, W, target, b = inputs(dtype=of)
    given = x, W, b
    loss = fused.linear_cross_entropy(x, W, target, b)
    with torch.profiler.profile(acc_events=True) as profile:
        (factor * loss).backward(retain_graph=kept)
    operators = {event.name for event in profile.events()}
    assert "autograd::engine::evaluate_function: FusedseqLinearCrossEntropyBackward" in operators
    given_away = factor == 1 and not kept
    assert ("fusedseq::linear_cross_entropy_scale" in operators) == (not given_away)

    # Each leaf's gradient is its own: a second loss adds to it.
    first = [t.grad.clone() for t in given]
    (factor * fused.linear_cross_entropy(x, W, target, b)).backward()
    for t, g in zip(given, first, strict=True):
        torch.testing.assert_close(t.grad, 2 * g)


@recorded
def test_a_gradient_without_a_value_is_multiplied():
    """Backward cannot ask whether the loss's gradient is one where that is a batch of gradients."""
    x, W, target, _ = inputs()
    factors = torch.tensor([1.0, 3.0], dtype=x.dtype)
    loss = fused.linear_cross_entropy(x, W, target)
    (batch,) = torch.autograd.grad(loss, W, factors, is_grads_batched=True)
    loss = fused.linear_cross_entropy(x, W, target)
    (expected,) = torch.autograd.grad(loss, W)
    torch.testing.assert_close(batch, factors.view(2, 1, 1) * expected)


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
