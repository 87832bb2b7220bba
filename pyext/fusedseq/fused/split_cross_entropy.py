from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from fusedseq.fused import autocast, check
from fusedseq.fused.linear_cross_entropy import REDUCTIONS, check_tensors, linear_cross_entropy

OP = "split_cross_entropy"
IGNORED = -100  # the target, in one part of the vocabulary, of rows whose word is in another part


def split_cross_entropy(
    x: Tensor,
    W: Tensor,
    target: Tensor,
    tombstones: Tensor | None,
    splits: Sequence[int],
    b: Tensor | None = None,
    tombstone_bias: Tensor | None = None,
    *,
    ignore_index: int = -100,
    reduction: str = "mean",
) -> Tensor:
    """Computes `fusedseq.reference.split_cross_entropy` as one `linear_cross_entropy` of the head
    and one of each tail.

    On a CPU, a tail costs only the rows whose targets it holds. On a GPU every row is computed in
    every tail: then no shape depends on the targets, so that nothing synchronizes and CUDA graphs
    can capture the call, but the arithmetic is that of the full softmax.

    Errors: those of `linear_cross_entropy`, and ValueError for splits that do not ascend in (0, V).
    """
    check.tensor(OP, "x", x)
    x, W, tombstones, b, tombstone_bias = autocast.cast(
        x.device.type, x, W, tombstones, b, tombstone_bias
    )
    target = check.int64(target)
    check_tensors(x, W, target, b, None, ignore_index, OP)
    if reduction not in REDUCTIONS:
        raise ValueError(f"{OP}: reduction must be one of {', '.join(REDUCTIONS)}, got {reduction}")
    splits = check_splits(splits, len(W))
    if not splits:
        return loss_of_part(x, W, target, b, ignore_index, reduction)
    tombstones = check_tombstones(x, tombstones, tombstone_bias, len(splits))

    is_target = target != ignore_index
    # The part of the vocabulary that holds the target: 0 is the head, i + 1 tail i.
    part = sum(((target >= split).long() for split in splits), torch.zeros_like(target))
    sizes = [end - start for start, end in pairwise((0, *splits, len(W)))]
    words, *tails = W.split(sizes)
    bias, *tail_biases = [None] * len(sizes) if b is None else b.split(sizes)
    of_rows = "none" if reduction == "none" else "sum"

    tombstone = splits[0] - 1 + part  # in the head, after its words
    in_head = torch.where(is_target, torch.where(part == 0, target, tombstone), IGNORED)
    head = torch.cat([words, tombstones])
    bias_of_head = head_bias(bias, tombstone_bias, words, tombstones)
    loss = loss_of_part(x, head, in_head, bias_of_head, IGNORED, of_rows)
    for i, (tail, tail_bias) in enumerate(zip(tails, tail_biases, strict=True)):
        in_tail = torch.where(is_target & (part == i + 1), target - splits[i], IGNORED)
        loss = loss + loss_of_part(x, tail, in_tail, tail_bias, IGNORED, of_rows)
    return loss / is_target.sum().clamp(min=1) if reduction == "mean" else loss


def loss_of_part(
    x: Tensor, W: Tensor, target: Tensor, b: Tensor | None, ignore_index: int, reduction: str
) -> Tensor:
    loss = linear_cross_entropy(x, W, target, b, ignore_index=ignore_index, reduction=reduction)
    assert isinstance(loss, Tensor)
    return loss


def whole_numbers(op: str, splits: Any) -> tuple[int, ...]:
    if not isinstance(splits, Sequence):
        raise TypeError(f"{op}: splits must be a sequence of whole numbers, got {splits!r}")
    found = tuple(splits)
    if any(isinstance(s, bool) or not isinstance(s, int) for s in found):
        raise TypeError(f"{op}: splits must be whole numbers, got {found}")
    return found


def check_splits(splits: Any, V: int) -> tuple[int, ...]:
    found = whole_numbers(OP, splits)
    if any(not start < end for start, end in pairwise((0, *found, V))):
        raise ValueError(f"{OP}: splits must ascend in (0, V) = (0, {V}), got {found}")
    return found


def check_tombstones(x: Tensor, tombstones: Any, tombstone_bias: Any, K: int) -> Tensor:
    others = {"tombstones": tombstones, "tombstone_bias": tombstone_bias}
    check.like(OP, x, "x", ("tombstone_bias",), check.TRITON, **others)
    check.shape(OP, "tombstones", tombstones, "(K, E)", (K, x.size(-1)))
    if tombstone_bias is not None:
        check.shape(OP, "tombstone_bias", tombstone_bias, "(K,)", (K,))
    return tombstones  # type: ignore[no-any-return]  # check.like requires a tensor


def head_bias(
    bias: Tensor | None, tombstone_bias: Tensor | None, words: Tensor, tombstones: Tensor
) -> Tensor | None:
    if bias is None and tombstone_bias is None:
        return None
    bias = words.new_zeros(len(words)) if bias is None else bias
    if tombstone_bias is None:
        tombstone_bias = tombstones.new_zeros(len(tombstones))
    return torch.cat([bias, tombstone_bias])
