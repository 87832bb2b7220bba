"""Checks of the sequences that a recurrent module is called with."""

from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

from fusedseq.fused import check


def check_x(module: str, x: Any, input_size: int, batch_first: bool, is_ragged: bool) -> None:
    """Requires an x that the forward of a recurrent module takes.

    module: its name, for messages    is_ragged: whether cu_seqlens is given
    """
    if isinstance(x, PackedSequence):
        if x.data.dim() != 2 or x.data.size(-1) != input_size:
            raise ValueError(
                f"{module}: x must be a PackedSequence with data (tokens, {input_size}), as "
                f"input_size is {input_size}, got data {tuple(x.data.shape)}"
            )
        return
    if not isinstance(x, Tensor):
        raise TypeError(f"{module}: x must be a tensor or a PackedSequence, got {type(x).__name__}")
    if x.is_nested:
        if x.layout != torch.jagged or x.dim() != 3 or x.size(-1) != input_size:
            # A nested tensor in another layout has no shape.
            got = f"{tuple(x.shape)} in" if x.layout == torch.jagged else f"{x.dim()} dimensions in"
            raise ValueError(
                f"{module}: a nested x must be (B, ragged, {input_size}) in the layout "
                f"torch.jagged, got {got} the layout {x.layout}"
            )
        return
    if x.layout != torch.strided:
        raise ValueError(f"{module}: x must be a dense tensor, got the layout {x.layout}")
    if is_ragged:
        if x.dim() != 2 or x.size(-1) != input_size:
            raise ValueError(
                f"{module}: x must be (tokens, {input_size}) with cu_seqlens, got {tuple(x.shape)}"
            )
    elif x.dim() not in (2, 3) or x.size(-1) != input_size:
        required = "B, T" if batch_first else "T, B"
        raise ValueError(
            f"{module}: x must be ({required}, {input_size}), or (T, {input_size}) without a batch "
            f"dimension, got {tuple(x.shape)}"
        )


def check_starts(module: str, starts: Any, x: Tensor, batch_first: bool) -> None:
    """Requires None, or a tensor with an element for each step of x, in the layout of x.

    x: (T, B, X), (B, T, X) with batch_first, or (T, X)
    """
    if starts is None:
        return
    check.tensor(module, "starts", starts)
    layout = "(T,)" if x.dim() == 2 else "(B, T)" if batch_first else "(T, B)"
    check.shape(module, "starts", starts, layout, x.shape[:-1])


def check_sequences(module: str, x: Any, lengths: Any, starts: Any, cu_seqlens: Any) -> None:
    """Requires that only one argument says which sequences there are."""
    if lengths is None and starts is None and cu_seqlens is None:
        return
    own = {
        "a PackedSequence": isinstance(x, PackedSequence),
        "a nested tensor": isinstance(x, Tensor) and x.is_nested,
        "cu_seqlens": cu_seqlens is not None,
    }
    given = {"lengths": lengths, "starts": starts, "cu_seqlens": cu_seqlens}
    for kind, is_used in own.items():
        for name, value in given.items():
            if is_used and value is not None and name != kind:
                raise ValueError(
                    f"{module}: {name} must be None with {kind}, which has its own sequences, got "
                    f"{name}"
                )
