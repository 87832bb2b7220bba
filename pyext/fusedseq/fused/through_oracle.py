"""Derivatives of an operator through its oracle, whose plain PyTorch has every derivative."""

import inspect
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten

from fusedseq.fused.schema import Gradients, Named


def call_reference(function: Callable[..., Any], named: Named) -> Any:
    """Calls a function of `fusedseq.reference` with those of its arguments that `named` holds; the
    others keep their defaults.
    """
    parameters = inspect.signature(function).parameters
    return function(**{name: named[name] for name in parameters if name in named})


def through_oracle(
    oracle: Callable[[Named], Any], named: Named, grads: Gradients, needed: frozenset[str]
) -> Gradients:
    """Returns gradients of `oracle(named)` that can be differentiated again, to any order.

    A backward that is recorded itself (create_graph=True) needs this, because `<op>_backward` has
    no derivative.

    oracle: returns a tensor or a nest of tensors, in the order of `grads`
    """
    order = [name for name in named if name in needed]
    upstream = [*grads.values()]

    def results(*values: Tensor) -> list[Tensor]:
        outputs = tree_flatten(oracle(named | dict(zip(order, values, strict=True))))[0]
        return [y for y, g in zip(outputs, upstream, strict=False) if g is not None]

    found = pull_back(results, [named[n] for n in order], [g for g in upstream if g is not None])
    return dict(zip(order, found, strict=True))


def pull_back(
    function: Callable[..., list[Tensor]],
    inputs: list[Tensor],
    grads: list[Tensor],
    create_graph: bool = True,
) -> Iterable[Tensor | None]:
    """Returns the gradients of `function(*inputs)`, a list of tensors whose gradients are `grads`;
    None for an input that no result depends on.
    """
    if torch._C._are_functorch_transforms_active():
        gradients: Callable[[list[Tensor]], tuple[Tensor, ...]] = torch.func.vjp(function, *inputs)[
            1
        ]
        return gradients(grads)
    with torch.enable_grad():
        # An alias of each input: one that is passed twice, or is computed from another, gets the
        # gradient of this use alone.
        aliases = [t.view_as(t) for t in inputs]
        pairs = [(y, g) for y, g in zip(function(*aliases), grads, strict=True) if y.requires_grad]
        if not pairs:
            return [None] * len(inputs)
        return torch.autograd.grad(
            [y for y, _ in pairs],
            aliases,
            [g for _, g in pairs],
            create_graph=create_graph,
            allow_unused=True,
        )
