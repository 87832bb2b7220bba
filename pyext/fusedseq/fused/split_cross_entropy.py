from itertools import pairwise

import torch

from fusedseq.fused import autograd, check
from fusedseq.fused.linear_cross_entropy import REDUCTIONS, check_tensors, linear_cross_entropy

OP = "split_cross_entropy"
NONE = -100  # the target of rows that are another part's


def split_cross_entropy(
    x, W, target, tombstones, splits, b=None, tombstone_bias=None, *, ignore_index=-100, reduction="mean"
):  # fmt: skip
    """As `fusedseq.reference.split_cross_entropy`: `linear_cross_entropy` on the head, and on each tail for its own rows.

    On a CPU a tail costs the rows that it has. On a GPU every row runs through every tail, whose shapes then do not depend
    on the targets: no waiting for the device, and CUDA graphs, at the arithmetic of the full softmax.
    Errors: as `linear_cross_entropy`, and ValueError for splits that do not ascend in (0, V).
    """
    check.tensor(OP, "x", x)
    x, W, tombstones, b, tombstone_bias = autograd.autocast(x.device.type, x, W, tombstones, b, tombstone_bias)
    check_tensors(x, W, target, b, None, ignore_index, OP)
    if reduction not in REDUCTIONS:
        raise ValueError(f"{OP}: reduction must be one of {', '.join(REDUCTIONS)}, got {reduction}")
    splits = check_splits(splits, len(W))
    if not splits:
        return linear_cross_entropy(x, W, target, b, ignore_index=ignore_index, reduction=reduction)
    check.like(OP, x, "x", ("tombstone_bias",), check.TRITON, tombstones=tombstones, tombstone_bias=tombstone_bias)
    check.shape(OP, "tombstones", tombstones, "(K, E)", (len(splits), W.size(1)))
    if tombstone_bias is not None:
        check.shape(OP, "tombstone_bias", tombstone_bias, "(K,)", (len(splits),))

    kept = target != ignore_index
    cluster = sum((target >= split).long() for split in splits)  # 0 is the head
    sizes = [end - start for start, end in pairwise((0, *splits, len(W)))]
    words, *tails = W.split(sizes)
    bias, *tail_biases = [None] * len(sizes) if b is None else b.split(sizes)
    of_rows = "none" if reduction == "none" else "sum"

    in_head = torch.where(kept, torch.where(cluster == 0, target, splits[0] - 1 + cluster), NONE)
    loss = linear_cross_entropy(
        x, torch.cat([words, tombstones]), in_head, head_bias(bias, tombstone_bias, words, tombstones), reduction=of_rows
    )  # fmt: skip
    for i, (tail, tail_bias) in enumerate(zip(tails, tail_biases, strict=True)):
        in_tail = torch.where(kept & (cluster == i + 1), target - splits[i], NONE)
        loss = loss + linear_cross_entropy(x, tail, in_tail, tail_bias, reduction=of_rows)
    return loss / kept.sum().clamp(min=1) if reduction == "mean" else loss


def check_splits(splits, V):
    splits = tuple(splits)
    if any(isinstance(s, bool) or not isinstance(s, int) for s in splits):
        raise TypeError(f"{OP}: splits must be whole numbers, got {splits}")
    if any(not start < end for start, end in pairwise((0, *splits, V))):
        raise ValueError(f"{OP}: splits must ascend in (0, V) = (0, {V}), got {splits}")
    return splits


def head_bias(bias, tombstone_bias, words, tombstones):
    if bias is None and tombstone_bias is None:
        return None
    bias = words.new_zeros(len(words)) if bias is None else bias
    return torch.cat([bias, tombstones.new_zeros(len(tombstones)) if tombstone_bias is None else tombstone_bias])
