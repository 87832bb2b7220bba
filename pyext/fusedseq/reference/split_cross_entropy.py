import torch

from fusedseq.reference.linear import linear
from fusedseq.reference.linear_cross_entropy import linear_cross_entropy


def split_cross_entropy(
    x, W, target, tombstones, splits, b=None, tombstone_bias=None, *, ignore_index=-100, reduction="mean"
):  # fmt: skip
    """The cross-entropy of the two-level model that AWD-LSTM's code calls split (Merity et al., 2018; Grave et al., 2017).

    x: (..., E)    W: (V, E)    target: (...,) int64 in [0, V), or ignore_index    b: (V,) or None
    splits: K places, ascending, in (0, V), where the vocabulary is cut into a head and K tails; () is plain cross-entropy
    tombstones: (K, E), the i-th stands in the head for tail i; None without splits    tombstone_bias: (K,) or None
    ignore_index, reduction: as in `linear_cross_entropy`    returns the loss: a scalar, or (...,) with "none"

    A normalised distribution, but not the softmax of all logits: the two are equal only where a tombstone's logit is the
    log-sum-exp of its tail's. It pays where words are ordered by frequency, so that most targets are in the head.
    """
    if not splits:
        return linear_cross_entropy(x, W, target, b, ignore_index=ignore_index, reduction=reduction)
    kept = target != ignore_index
    x = torch.where(kept[..., None], x, 0)
    log_probs = log_prob(x, W, tombstones, splits, b, tombstone_bias)
    loss = -log_probs.gather(-1, torch.where(kept, target, 0)[..., None])[..., 0]
    loss = torch.where(kept, loss, 0)
    if reduction == "none":
        return loss
    return loss.sum() / kept.sum().clamp(min=1) if reduction == "mean" else loss.sum()


def log_prob(x, W, tombstones, splits, b=None, tombstone_bias=None):
    """The log-probability of every word, (..., V), in fp32 where x is narrower; arguments as in `split_cross_entropy`."""

    def logits(W, b):
        z = linear(x, W, b)
        return z.to(torch.promote_types(z.dtype, torch.float32))

    parts = zip((0, *splits), (*splits, len(W)), strict=True)
    words, *tails = (logits(W[i:j], None if b is None else b[i:j]) for i, j in parts)
    if not splits:
        return words.log_softmax(-1)
    head = torch.cat([words, logits(tombstones, tombstone_bias)], -1).log_softmax(-1)
    words, into_tails = head.split([splits[0], len(splits)], -1)
    tails = [into + tail.log_softmax(-1) for into, tail in zip(into_tails.split(1, -1), tails, strict=True)]
    return torch.cat([words, *tails], -1)
