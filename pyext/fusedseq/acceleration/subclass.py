"""Subclasses of classes that this package cannot name, because others define them."""

import functools
from typing import Any

from torch import nn


class Accelerated:
    """The first base of such a subclass; the second is the class of the module before.

    A copy or an unpickled module gets its class from `extend` again.
    """

    def __reduce_ex__(self, protocol: Any) -> Any:
        computed_by, kind = type(self).__bases__
        return new_module, (computed_by, kind), self.__getstate__()


@functools.cache
def extend(computed_by: type[Accelerated], kind: type[nn.Module]) -> type[nn.Module]:
    """Returns the subclass of `kind` whose forward is that of `computed_by`, always the same."""
    return type(kind.__name__, (computed_by, kind), {})


def new_module(computed_by: type[Accelerated], kind: type[nn.Module]) -> nn.Module:
    """Returns an object of extend(computed_by, kind) without attributes."""
    found: type[Any] = extend(computed_by, kind)
    return found.__new__(found)
