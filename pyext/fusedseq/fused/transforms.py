"""What traces or transforms a call: torch.compile, torch.func's transforms, and forward-mode AD."""

from collections.abc import Iterable
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
