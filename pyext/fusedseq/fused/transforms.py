"""What traces or transforms a call: torch.compile, torch.func's transforms, and forward-mode AD."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._C._functorch import TransformType
from torch._functorch.pyfunctorch import retrieve_all_functorch_interpreters
from torch.autograd import forward_ad


def is_transformed() -> bool:
    """Whether torch.compile or a transform of torch.func traces this call, or forward-mode AD is in
    use.
    """
    return bool(
        torch.compiler.is_compiling()
        or torch._C._are_functorch_transforms_active()
        or forward_ad._current_level >= 0
    )


def has_tangents(inputs: Iterable[Any]) -> bool:
    """Whether a tensor among `inputs` is a dual tensor of torch.autograd.forward_ad."""
    return forward_ad._current_level >= 0 and any(
        isinstance(t, Tensor) and forward_ad.unpack_dual(t).tangent is not None for t in inputs
    )


def active_transforms() -> set[Any]:
    """The kinds of torch.func's transforms that are active, as TransformType."""
    if not torch._C._are_functorch_transforms_active():
        return set()
    return {one.key() for one in retrieve_all_functorch_interpreters()}


def needs_oracle(inputs: Iterable[Any] = ()) -> bool:
    """Whether a call has tangents or a batch dimension of torch.func.vmap, for which there are no
    kernels.
    """
    return has_tangents(inputs) or not active_transforms().isdisjoint(
        (TransformType.Vmap, TransformType.Jvp)
    )


def only_batches(inputs: Iterable[Any]) -> bool:
    """Whether torch.func.vmap alone keeps a call from the kernels, at any depth and with grad and
    vjp around or inside of it: the kernels can then be called for one element after the other.
    """
    active = active_transforms()
    return (
        TransformType.Vmap in active
        and active <= {TransformType.Vmap, TransformType.Grad}
        and not has_tangents(inputs)
    )


def one_by_one(
    function: Callable[..., Sequence[Tensor | None]],
    batch_size: int,
    in_dims: Sequence[Any],
    inputs: Sequence[Any],
) -> tuple[tuple[Tensor | None, ...], tuple[int | None, ...]]:
    """Calls a function for each element of a batch, as the method `vmap` of a
    torch.autograd.Function; returns the stacked results, and 0, the batch dimension of each.

    in_dims: the batch dimension of each input; None, or a nest of it, for one that all elements
        share
    """
    pairs = [*zip(inputs, in_dims, strict=True)]

    def element(value: Any, d: Any, i: int) -> Any:
        if not isinstance(d, int):
            return value
        return value.select(d, i) if batch_size else value.new_zeros(value.movedim(d, 0).shape[1:])

    # Of an empty batch, a call on zeros has results of the right shapes, none of which is returned.
    rows = [function(*[element(value, d, i) for value, d in pairs]) for i in range(batch_size or 1)]
    columns = [[*column] for column in zip(*rows, strict=True)]
    results = tuple(
        [None if column[0] is None else torch.stack(column)[:batch_size] for column in columns]
    )
    return results, tuple([None if y is None else 0 for y in results])
