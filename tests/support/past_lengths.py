"""What lies past the lengths of sequences, and that it does not matter to a recurrence."""

from itertools import chain

import torch
from fusedseq.testing import cotangents, differentiable
from torch.utils._pytree import tree_leaves, tree_map

FORBIDDEN = (float("nan"), float("inf"), -float("inf"), 3e38)


def steps_past(lengths, T):
    """Returns whether each step is past its sequence's length: (T, B, 1)."""
    return (torch.arange(T)[:, None] >= torch.as_tensor(lengths))[:, :, None]


def filled(t, past, value):
    """A copy of t (T, B, .) with `value` past the lengths; None fills all of FORBIDDEN."""
    values = torch.tensor(FORBIDDEN if value is None else (value,))
    values = values.repeat(t.numel() // len(values) + 1)[: t.numel()].view(t.shape)
    return torch.where(past.to(t.device), values.to(t.device, t.dtype), t.detach())


def outcome(function, args, kwargs, past, value, higher=False):
    """Returns the results of a recurrence, its gradients, and with `higher` second derivatives.

    args[0] is x. x, and the gradient of every y, have `value` past the lengths.
    past: as returned by `steps_past`
    """
    x, *others = args
    clone = lambda t: t.detach().clone() if isinstance(t, torch.Tensor) else t  # noqa: E731
    args, kwargs = (filled(x, past, value), *tree_map(clone, others)), tree_map(clone, kwargs)
    leaves = [t.requires_grad_() for t in differentiable(args, kwargs)]
    results = tree_leaves(function(*args, **kwargs))
    douts = [filled(d, past, value) if d.dim() == 3 else d for d in cotangents(results)]
    if higher:
        leaves += [d.requires_grad_() for d in douts]
    grads = torch.autograd.grad(
        results,
        leaves[: len(leaves) - len(douts)] if higher else leaves,
        douts,
        create_graph=higher,
    )
    second = ()
    if higher:
        penalty = sum(g.double().square().sum() for g in grads)
        second = torch.autograd.grad(penalty, leaves, materialize_grads=True)
    return [y.detach() for y in results], list(grads), list(second)


def assert_does_not_matter(function, args, kwargs, lengths, value=None, higher=False):
    """Asserts that `value` past the lengths gives the bits that zeros there give, in results and
    gradients; that all of them are finite; and that y and the gradient of x are 0 there.
    """
    past = steps_past(lengths, len(args[0]))
    expected = outcome(function, args, kwargs, past, 0.0, higher)
    got = outcome(function, args, kwargs, past, value, higher)
    for this, other in zip(chain(*got), chain(*expected), strict=True):
        assert this.isfinite().all()
        assert torch.equal(this, other)
    results, (dx, *_), _ = got
    for t in (dx, *(y for y in results if y.dim() == 3)):
        assert not t[past.to(t.device).expand_as(t)].count_nonzero()
    return got
