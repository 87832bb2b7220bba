"""The states of the recurrent modules: their form, and the zeros that a sequence starts from."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

OfLayers = Sequence[Tensor] | Tensor  # of all layers: (num_layers * directions, B, H), or a list
LayerState = tuple[Tensor, ...]  # (h, c), or (h,), of one direction of a layer, (B, H) each


@dataclass(frozen=True)
class StateForm:
    """The form in which a module takes and returns the state of all layers and directions."""

    module: str  # the name of the module, for messages
    names: tuple[str, ...]  # of the tensors: h and c, or h alone
    layers: int
    directions: int

    def parts(self, state: Any, is_batched: bool = True) -> Sequence[OfLayers]:
        """Returns the tensors of a state in the order of `names`.

        is_batched: whether they have a batch dimension
        Errors: ValueError for a state of another form.
        """
        parts = state if len(self.names) > 1 else (state,)
        entries, dimensions = self.layers * self.directions, 1 + is_batched
        if _length(parts) != len(self.names) or not all(
            _has_entries(part, entries, dimensions) for part in parts
        ):
            raise ValueError(
                f"{self.module}: state must be {self._wanted(is_batched)}, got {_shown(state)}"
            )
        found: Sequence[OfLayers] = parts
        return found

    def whole(self, parts: Sequence[Any]) -> Any:
        """Returns the state of which these are the tensors."""
        return tuple(parts) if len(self.names) > 1 else parts[0]

    def _wanted(self, is_batched: bool) -> str:
        name = f"({', '.join(self.names)}), each" if len(self.names) > 1 else self.names[0]
        layers, directions = "num_layers", ""
        if self.directions > 1:
            layers, directions = f"{self.directions} * num_layers", " and direction"
        H, unbatched = "B, H", ""
        if not is_batched:
            H, unbatched = "H", ", for an x without a batch dimension"
        return (
            f"{name} ({layers}, {H}) or a list with an entry ({H}{'' if is_batched else ','}) for "
            f"each of {self.layers} layers{directions}{unbatched}"
        )


def zeros_of(x: Tensor, widths: Sequence[int]) -> list[Tensor]:
    """Returns (B, width) zeros for every width; entries of one width are one tensor, since no
    operator changes its initial state.    x: (T, B, X)
    """
    zeros = {width: x.new_zeros(x.size(1), width) for width in {*widths}}
    return [zeros[width] for width in widths]


def _length(value: Any) -> int | None:
    """Returns the number of entries, or None of what has none."""
    has_entries = isinstance(value, (tuple, list)) or (isinstance(value, Tensor) and value.dim())
    return len(value) if has_entries else None


def _has_entries(part: Any, entries: int, dimensions: int) -> bool:
    """Whether a tensor, tuple or list has so many entries, tensors of so many dimensions."""
    if isinstance(part, Tensor):
        return part.dim() == dimensions + 1 and part.size(0) == entries
    return _length(part) == entries and all(
        isinstance(t, Tensor) and t.dim() == dimensions for t in part
    )


def _shown(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"a tensor {tuple(value.shape)}"
    if isinstance(value, (tuple, list)):
        return f"({', '.join(map(_shown, value))}{',' if len(value) == 1 else ''})"
    return type(value).__name__
