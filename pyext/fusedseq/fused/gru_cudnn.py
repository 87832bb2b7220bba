"""Which calls of `gru` and `rnn` cuDNN computes, and how."""

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fusedseq import reference
from fusedseq.fused import cudnn_recurrence
from fusedseq.fused.schema import Named
from fusedseq.fused.transforms import is_transformed
from fusedseq.reference.steps import flip_sequences, mask_of_steps

OPERATORS = ("gru", "rnn")


def supports(
    x: Tensor,
    lengths: Tensor | Sequence[int] | None = None,
    *,
    relu: bool = False,
    starts: Tensor | None = None,
    zoneout_h: float = 0.0,
    weight_drop: float = 0.0,
    training: bool = True,
    **_: Any,
) -> bool:
    """Whether cuDNN computes a call of `gru` or `rnn`, given its arguments by name: it has kernels
    for whole sequences, while the loop of csrc/cuda/recurrence/loop.cu launches two for a step.

    Not with `starts`, zoneout or a weight drop, which cuDNN does not have, and not while
    torch.compile or torch.func traces the call. Not with lengths and ReLUs: cuDNN computes the
    steps past a length too, and the state of an RNN with ReLUs can overflow there, so that its
    gradient is NaN.
    """
    if is_transformed():
        return False
    if starts is not None or zoneout_h or (weight_drop and training):
        return False
    if x.size(1) == 0 or (relu and lengths is not None):
        return False
    return cudnn_recurrence.accepts(x) and cudnn_recurrence.may_replace_loop()


def call(op: str, a: Named) -> tuple[Tensor, Tensor]:
    """Computes a call of `gru` or `rnn` by cuDNN.    a: the checked arguments by name"""
    x, h0, lengths = a["x"], a["h0"], a["lengths"]
    alive = mask_of_steps(lengths, x)
    if alive is not None:
        x = torch.where(alive, x, 0.0)
    if a["reverse"]:
        x = flip_sequences(x, lengths)
    mode, oracle = cudnn_recurrence.GRU, getattr(reference, op)
    if op == "rnn":
        mode = cudnn_recurrence.RELU if a["relu"] else cudnn_recurrence.TANH
        oracle = functools.partial(oracle, relu=a["relu"])
    weights = a["W_ih"].contiguous(), a["W_hh"].contiguous()
    b = None if a["b"] is None else a["b"].contiguous()
    y, h = cudnn_recurrence.call(mode, oracle, x.contiguous(), *weights, b, h0.contiguous())
    if alive is not None:
        # The state after a sequence's last step, or the initial one of a sequence without steps.
        last_step = (lengths - 1).clamp(min=0)[None, :, None].expand(1, *h0.shape)
        h = torch.where(lengths[:, None] > 0, y.gather(0, last_step)[0], h0)
        y = torch.where(alive, y, 0.0)
    return (flip_sequences(y, lengths) if a["reverse"] else y), h
