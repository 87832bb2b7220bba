"""Compares a fused operator with its oracle: results and gradients, within the error budget."""

import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils._pytree import tree_leaves, tree_map

from fusedseq import fused, reference
from fusedseq.testing import conditioning, ties
from fusedseq.testing.budget import (
    CUDNN_ERROR,
    ONE_COLUMN_ERROR,
    assert_within_budget,
    plain_dtype,
    roundings,
)

# Arguments given by name that are float tensors but have no gradient.
CONSTANTS = {"alibi", "class_weights", "rope"}
# Operators of which cuDNN computes some calls.
BY_CUDNN = ("lstm", "bidirectional_lstm", "gru", "projected_lstm", "rnn")


def convert(tree: Any, device: Any = None, dtype: torch.dtype | None = None) -> Any:
    """The arguments with all tensors moved to `device` and float tensors converted to `dtype`."""

    def move(t):
        if not isinstance(t, torch.Tensor):
            return t
        return t.to(device, dtype if t.is_floating_point() else None)

    return tree_map(move, tree)


def differentiable(args: Sequence, kwargs: dict) -> list[torch.Tensor]:
    """The float tensors among the arguments that have a gradient, also inside tuples, in order."""
    kwargs = {name: value for name, value in kwargs.items() if name not in CONSTANTS}
    leaves = [t for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)]
    return [t for t in leaves if t.is_floating_point()]


def names(op: str, args: Sequence, kwargs: dict) -> list[str]:
    """The argument name of each tensor of `differentiable(args, kwargs)`, e.g. W_ih or Q[0]."""
    arguments = inspect.signature(getattr(reference, op)).bind(*args, **kwargs).arguments
    found = []
    for name, value in arguments.items():
        leaves = differentiable((), {name: value})
        if isinstance(value, torch.Tensor) and leaves:
            found.append(name)
        else:
            found += [f"{name}[{i}]" for i in range(len(leaves))]
    return found


def cotangents(outputs: Sequence[torch.Tensor], expanded: bool = False) -> list[torch.Tensor]:
    """A fixed random gradient for each output.

    expanded: ones of stride 0 instead, the gradient that the backward of sum() passes on
    """
    if expanded:
        return [y.new_ones(()).expand_as(y) for y in outputs]
    generator = torch.Generator().manual_seed(1)
    return [
        torch.randn(y.shape, generator=generator, device="cpu").to(y.device, y.dtype)
        for y in outputs
    ]


def select_outputs(results: Sequence[torch.Tensor], outputs: Sequence[int] | None) -> list:
    """The float tensors among the results; with `outputs`, those at these indices."""
    return [
        y
        for i, y in enumerate(results)
        if y.is_floating_point() and (outputs is None or i in outputs)
    ]


def run(
    function: Callable,
    args: Sequence,
    kwargs: dict,
    needs: Sequence[int] | None = None,
    outputs: Sequence[int] | None = None,
    expanded: bool = False,
    grad_outputs: Sequence[torch.Tensor] | None = None,
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Calls `function` and differentiates it: flat lists of its results and of its gradients.

    needs: the indices in `differentiable(args, kwargs)` of the inputs that require a gradient;
        default all, [] for no backward
    outputs: the indices of the results that are differentiated; default all floats
    expanded: as for `cotangents`
    grad_outputs: the gradients of the results; default `cotangents`
    """
    detach = lambda t: t.detach() if isinstance(t, torch.Tensor) else t  # noqa: E731
    args, kwargs = tree_map(detach, (args, kwargs))
    leaves = differentiable(args, kwargs)
    leaves = leaves if needs is None else [leaves[i] for i in needs]
    for leaf in leaves:
        leaf.requires_grad_()
    results = tree_leaves(function(*args, **kwargs))
    if not leaves:
        return results, []
    used = select_outputs(results, outputs)
    if grad_outputs:
        grad_outputs = convert(grad_outputs, used[0].device, used[0].dtype)
    else:
        grad_outputs = cotangents(used, expanded)
    # A result may depend on none of the leaves: autograd has no graph for it.
    pairs = [pair for pair in zip(used, grad_outputs, strict=True) if pair[0].requires_grad]
    used, grad_outputs = [y for y, _ in pairs], [dy for _, dy in pairs]
    grads = torch.autograd.grad(used, leaves, grad_outputs, materialize_grads=True)
    return [y.detach() for y in results], list(grads)


def is_by_cudnn(op: str, args: Sequence, kwargs: dict) -> bool:
    """Whether cuDNN computes a call, whose error is not this package's."""
    if op not in BY_CUDNN or not args[0].is_cuda:
        return False
    return "cuDNN" in fused.explain(op, *args, **kwargs)


def check(
    op: str,
    args: Sequence,
    kwargs: dict,
    *,
    needs: Sequence[int] | None = None,
    backward: bool = True,
    outputs: Sequence[int] | None = None,
    expanded: bool = False,
    function: Callable | None = None,
    together: bool = False,
) -> float:
    """Asserts that the results and gradients of `fused.<op>` agree with the oracle's.

    needs, outputs, expanded: as for `run`
    backward: False checks the results alone
    function: checked in place of `fused.<op>`
    together: compares all gradients as one vector. Use it where one gradient is zero but for
        rounding errors, so that no error is a small fraction of it. It is done for norms of one
        column, whose gradient of x is zero, and for recurrent layers of one unit in 16 bits: where
        a gradient is one number, the oracle's error may be small by chance
    returns the largest error as a fraction of its budget
    """
    leaves = differentiable(args, kwargs)
    dtype = leaves[0].dtype if leaves else torch.float32
    if not backward or not leaves:
        needs = []
    elif needs is None:
        needs = list(range(len(leaves)))
    results, grads = run(function or getattr(fused, op), args, kwargs, needs, outputs, expanded)
    # The oracle gets the same gradients of the results in either dtype: those rounded to the
    # operator's dtype.
    grad_outputs = cotangents(select_outputs(results, outputs), expanded) if needs else None
    oracle = getattr(reference, op)

    def run_oracle_with(args: Sequence, kwargs: dict, dtype: torch.dtype) -> ties.Results:
        a, k = convert((args, kwargs), dtype=dtype)
        return run(oracle, a, k, needs, outputs, grad_outputs=grad_outputs)

    def run_oracle(dtype: torch.dtype) -> ties.Results:
        return run_oracle_with(args, kwargs, dtype)

    runs = [(results, grads), run_oracle(plain_dtype(dtype)), run_oracle(torch.float64)]
    has_ties = bool(kwargs.get("cap_input_gate")) and bool(needs) and dtype == torch.float32
    if has_ties:
        runs.append(ties.spread(lambda: run_oracle(torch.float64), dtype))
    argument_names = names(op, args, kwargs)
    labels = [f"{op}: result {i}" for i in range(len(results))]
    units = [t.size(-1) for t, name in zip(leaves, argument_names, strict=True) if name == "W_hh"]
    if units and conditioning.has_few_units(op, units[0]):
        exact = functools.partial(run_oracle_with, dtype=torch.float64)
        runs.append(conditioning.spread(exact, args, kwargs, dtype))
    one_unit = units == [1] and dtype.itemsize == 2
    one_column = op == "residual_layer_norm" and leaves[0].size(-1) == 1
    together = together or one_unit or one_column
    if together and needs:
        labels.append(f"{op}: gradients")
        runs = [(y, [torch.cat([g.flatten() for g in grads])]) for y, grads in runs]
    else:
        labels += [f"{op}: gradient of {argument_names[i]}" for i in needs]
    tensors = zip(labels, *(y + grads for y, grads in runs), strict=True)
    terms = roundings(op, args, leaves)
    more = CUDNN_ERROR if is_by_cudnn(op, args, kwargs) and dtype == torch.float32 else 0.0
    more += ONE_COLUMN_ERROR if one_column and args[0].is_cuda else 0.0
    return max(
        assert_within_budget(label, got, plain, exact, dtype, terms, more, *spread)
        for label, got, plain, exact, *spread in tensors
    )
