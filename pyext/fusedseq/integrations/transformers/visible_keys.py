"""A boolean mask that is held as arguments of `fused.attention` and not as a dense tensor."""

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

ADDITIONS = ("add", "add_", "baddbmm", "sub", "rsub")
Operator: TypeAlias = Callable[..., Any]


class VisibleKeys(Tensor):
    """A (B, 1, L, S) bool tensor, true where a query sees a key, without its B L S elements.

    `options` are the arguments of `fused.attention` that describe it: causal, offset, window,
    key_lengths and mask. Any operator of torch gets the dense tensor instead, so that a model may
    slice or combine its mask as if it were dense.

    A mask of bool values that is added to logits masks nothing. Attention code that does so is not
    written for bool masks, so adding raises ValueError. (Python would replace a TypeError by one
    about unsupported operands.)

    shape: (B, 1, L, S) of the dense mask
    device: where the dense mask is made
    """

    options: dict[str, Any]

    @staticmethod
    def __new__(
        cls: type["VisibleKeys"],
        shape: Sequence[int],
        device: torch.device | str,
        options: dict[str, Any],
    ) -> "VisibleKeys":
        mask: VisibleKeys = Tensor._make_wrapper_subclass(
            cls, tuple(shape), dtype=torch.bool, device=torch.device(device)
        )
        mask.options = options
        return mask

    def __init__(self, *_: Any) -> None:
        super().__init__()

    def dense(self) -> Tensor:
        """Returns the mask as an ordinary (B, 1, L, S) tensor."""
        L, S = self.shape[-2:]
        visible = torch.ones((1, 1, L, S), dtype=torch.bool, device=self.device)
        j = torch.arange(S, device=self.device)
        if self.options.get("causal"):
            i = torch.arange(L, device=self.device)[:, None] + self.options["offset"]
            visible = visible & (j <= i)
            if "window" in self.options:
                visible = visible & (j >= i - self.options["window"][0])
        if "key_lengths" in self.options:
            visible = visible & (j < self.options["key_lengths"][:, None, None, None])
        if "mask" in self.options:
            visible = visible & self.options["mask"]
        return visible.expand(self.shape)

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls,
        func: Any,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if func.__name__.split(".")[0] in ADDITIONS:
            raise ValueError(
                "fusedseq: a bool mask, true where a key is visible, was added to attention "
                "logits, which would mask nothing; this model has attention code of its own, so "
                'load it with attn_implementation="eager"'
            )
        args, kwargs = pytree.tree_map_only(cls, cls.dense, (args, kwargs or {}))
        return func(*args, **kwargs)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"VisibleKeys({tuple(self.shape)}, {self.options})"
