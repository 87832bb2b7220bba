"""torch's autocast for the operators: which tensors are cast, and to what."""

import functools
from typing import Any

import torch
from torch import Tensor

# The types of devices for which torch.is_autocast_enabled raises an error. They are written out as
# torch.compile of torch 2.11 cannot trace torch.amp.is_autocast_available.
WITHOUT_AUTOCAST = frozenset(("lazy", "meta", "vulkan"))


def is_on(device_type: str) -> bool:
    return device_type not in WITHOUT_AUTOCAST and torch.is_autocast_enabled(device_type)


def is_dtype(device_type: str, dtype: torch.dtype) -> bool:
    """Whether autocast is on and casts to this dtype."""
    return is_on(device_type) and torch.get_autocast_dtype(device_type) == dtype


def cast(device_type: str, *tensors: Any) -> tuple[Any, ...]:
    """The tensors, with floating-point ones other than fp64 cast to autocast's dtype, as torch does
    for matrix products. None stays None.
    """
    if not is_on(device_type):
        return tensors
    dtype = torch.get_autocast_dtype(device_type)
    return tuple(t.to(dtype) if isinstance(t, Tensor) and is_cast(t) else t for t in tensors)


def is_cast(t: Tensor) -> bool:
    """Returns whether autocast, where it is on, casts a tensor."""
    return t.is_floating_point() and t.dtype != torch.float64


def promote(device_type: str, *tensors: Any) -> tuple[Any, ...]:
    """Under autocast, the tensors in the widest of their dtypes, as torch promotes the operands of
    a sum.
    """
    if not is_on(device_type):
        return tensors
    dtypes = [t.dtype for t in tensors if isinstance(t, Tensor) and t.is_floating_point()]
    if not dtypes:
        return tensors
    dtype = functools.reduce(torch.promote_types, dtypes)
    return tuple(
        t.to(dtype) if isinstance(t, Tensor) and t.is_floating_point() else t for t in tensors
    )
