"""One entry of the case table: reproducible inputs of one operator."""

import zlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from fusedseq.testing.check import convert


@dataclass(frozen=True)
class Case:
    """Inputs of one operator.

    op: the name of the operator in fusedseq.fused and fusedseq.reference
    id: describes the inputs; unique among the cases of the operator, and the seed of their random
        numbers
    make: make(randn) returns (args, kwargs), where randn(*shape) draws a float32 tensor of normal
        numbers
    smooth: the operator is differentiable at these inputs, so that finite differences approximate
        its gradient
    """

    op: str
    id: str
    make: Callable[..., tuple[tuple, dict]]
    smooth: bool = True

    def inputs(self, device: Any = "cpu", dtype: torch.dtype = torch.float32) -> tuple[tuple, dict]:
        """(args, kwargs): the same numbers at every call and on every device."""
        generator = torch.Generator().manual_seed(zlib.crc32(f"{self.op} {self.id}".encode()))
        with torch.device("cpu"):  # generators differ between devices
            inputs = self.make(lambda *shape: torch.randn(shape, generator=generator))
        return convert(inputs, device, dtype)

    def __str__(self) -> str:
        return f"{self.op}-{self.id}"


def join(*words: str) -> str:
    """The id made of these words; empty words are left out."""
    return "-".join(word for word in words if word)


def dimensions(shape: tuple[int, ...]) -> str:
    """The shape as a word of an id: 2x3x5."""
    return "x".join(map(str, shape))


def option_words(options: dict[str, Any]) -> list[str]:
    """Options of an operator as words of an id: name and value. The seed is no part of an id."""
    return [
        value if isinstance(value, str) else f"{name}{value:g}"
        for name, value in options.items()
        if name != "seed"
    ]
