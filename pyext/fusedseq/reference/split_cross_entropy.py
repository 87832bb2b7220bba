from collections.abc import Sequence

import torch
from torch import Tensor

from fusedseq.reference.linear import linear
from fusedseq.reference.linear_cross_entropy import linear_cross_entropy


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
    """The cross-entropy of a two-level softmax, which AWD-LSTM's code calls split (Merity et al.,
    2018; Grave et al., 2017, section 4).

    x: (..., E)
    W: (V, E)
    target: (...,) int64 or int32, in [0, V) or equal to ignore_index
    tombstones: (K, E); row i represents tail i in the head; None without splits
    splits: K ascending indices in (0, V) that cut the vocabulary into a head and K tails; with ()
        this is the plain cross-entropy
    b: (V,) or None
    tombstone_bias: (K,) or None
    ignore_index, reduction: as in `linear_cross_entropy`
    returns the loss, a scalar, or (...,) with reduction "none"

    The probabilities of all words sum to 1, but they are not those of one softmax over all logits:
    the two are equal only where each tombstone's logit is the log-sum-exp of its tail. It is faster
    where words are ordered by frequency, so that most targets are in the head.
    """
    if not splits:
        loss = linear_cross_entropy(x, W, target, b, ignore_index=ignore_index, reduction=reduction)
        assert isinstance(loss, Tensor)
        return loss
    is_target = target != ignore_index
    x = torch.where(is_target[..., None], x, 0)
    log_probs = log_prob(x, W, tombstones, splits, b, tombstone_bias)
    y = torch.where(is_target, target, 0).long()
    loss = -log_probs.gather(-1, y[..., None])[..., 0]
    loss = torch.where(is_target, loss, 0)
    if reduction == "none":
        return loss
    return loss.sum() / is_target.sum().clamp(min=1) if reduction == "mean" else loss.sum()


def log_prob(
    x: Tensor,
    W: Tensor,
    tombstones: Tensor | None,
    splits: Sequence[int],
    b: Tensor | None = None,
    tombstone_bias: Tensor | None = None,
) -> Tensor:
    """Returns the log-probability of every word, (..., V), in fp32 where x has 16 bits. The
    arguments are those of `split_cross_entropy`."""

    def logits(W: Tensor, b: Tensor | None) -> Tensor:
        z = linear(x, W, b)
        return z.to(torch.promote_types(z.dtype, torch.float32))

    parts = zip((0, *splits), (*splits, len(W)), strict=True)
    words, *tails = (logits(W[i:j], None if b is None else b[i:j]) for i, j in parts)
    if not splits:
        return words.log_softmax(-1)
    head = torch.cat([words, logits(tombstones, tombstone_bias)], -1).log_softmax(-1)
    words, to_tails = head.split([splits[0], len(splits)], -1)
    tails = [
        to_tail + tail.log_softmax(-1)
        for to_tail, tail in zip(to_tails.split(1, -1), tails, strict=True)
    ]
    return torch.cat([words, *tails], -1)
