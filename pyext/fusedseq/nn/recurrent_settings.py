"""The arguments of the recurrent modules: of the constructors, and the order of a call's steps."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor

from fusedseq.fused import check
from fusedseq.nn.dropout import check_probability

FLAGS = ("bias", "variational", "residual", "batch_first", "bidirectional")


@dataclass(frozen=True)
class RecurrentSettings:
    """The arguments that the recurrent modules have in common; see `LSTM`."""

    input_size: int
    hidden_size: int | Sequence[int]  # one size for all layers, or one for each
    num_layers: int
    bias: bool
    weight_drop: float  # on W_hh, in [0, 1]
    variational: bool  # of weight_drop: one mask value per row of W_hh
    residual: bool  # layer l > 0 reads the sum of the outputs of the layers l-1 and l-2
    output: Literal["last", "sum"]  # of which layers
    batch_first: bool
    bidirectional: bool
    device: torch.device | str | None
    dtype: torch.dtype | None
    proj_size: int = 0  # of an LSTM's h, 0 for H
    zoneout_h: float = 0.0  # in [0, 1]
    zoneout_c: float = 0.0  # the same, of a module whose state has c

    @property
    def directions(self) -> int:
        return 2 if self.bidirectional else 1

    def typed(self, module: str) -> "RecurrentSettings":
        """Returns the settings with whole numbers as ints; raises TypeError, naming the module and
        the argument, for a flag that is not a bool and a size that is not a whole number.
        """
        for name in FLAGS:
            check.flag(module, name, getattr(self, name))
        sizes: dict[str, Any] = {
            name: check.whole_number(module, name, getattr(self, name))
            for name in ("input_size", "num_layers", "proj_size")
        }
        hidden: Any = self.hidden_size
        is_list = isinstance(hidden, Sequence) and not isinstance(hidden, str)
        of_layers = [
            check.whole_number(module, "hidden_size", H, " or one for each layer")
            for H in (hidden if is_list else [hidden])
        ]
        return replace(self, **sizes, hidden_size=of_layers if is_list else of_layers[0])

    def hidden_sizes(self, module: str) -> list[int]:
        """Returns H of each layer; raises ValueError, naming the module, for invalid settings."""
        hidden, L = self.hidden_size, self.num_layers
        sizes = [hidden] * L if isinstance(hidden, int) else list(hidden)
        if L < 1 or len(sizes) != L:
            raise ValueError(
                f"{module}: hidden_size must be an int or one size for each of num_layers = {L} "
                f"layers (at least 1), got {hidden}"
            )
        if min(self.input_size, *sizes) < 1:
            raise ValueError(
                f"{module}: input_size and hidden_size must be at least 1, got {self.input_size} "
                f"and {hidden}"
            )
        if self.output not in ("last", "sum"):
            raise ValueError(f"{module}: output must be 'last' or 'sum', got {self.output!r}")
        widths = [self.directions * (self.proj_size or H) for H in sizes]
        if self.residual and len({self.input_size, *widths}) > 1:
            raise ValueError(
                f"{module}: residual must be False unless input_size and all hidden sizes are "
                f"equal, got {self.input_size} and {widths}"
            )
        if self.output == "sum" and len(set(sizes)) > 1:
            raise ValueError(
                f"{module}: output must be 'last' unless all hidden sizes are equal, got {sizes}"
            )
        if not 0 <= self.proj_size < min(sizes):
            raise ValueError(
                f"{module}: proj_size must be 0, for no projection, or less than hidden_size, got "
                f"{self.proj_size} and {hidden}"
            )
        for name in ("zoneout_h", "zoneout_c", "weight_drop"):
            check_probability(getattr(self, name), module, name)
        return sizes


@dataclass(frozen=True)
class Order:
    """Which steps a call reads, and where sequences start in them."""

    lengths: Tensor | None  # (B,)
    starts: Tensor | None  # (T, B)

    def arguments(self, reverse: bool) -> dict[str, Any]:
        """Returns the operators' arguments `lengths`, `starts` and `reverse`."""
        starts = self.starts
        if reverse and starts is not None:
            # Read from its end, a sequence starts at its last step, before the next one's first.
            if self.lengths is not None:
                t = torch.arange(starts.size(0), device=starts.device)
                starts = starts & (t[:, None] < self.lengths)
            starts = torch.cat([starts[1:], torch.zeros_like(starts[:1])])
        return {"lengths": self.lengths, "starts": starts, "reverse": reverse}
