import math

import torch


def linear_cross_entropy(
    x, W, target, b=None, *, class_weights=None, ignore_index=-100, label_smoothing=0.0, z_loss=0.0, temperature=1.0,
    reduction="mean", return_details=False,
):  # fmt: skip
    """The cross-entropy of a linear map: torch.nn.functional.cross_entropy of linear(x, W, b) / temperature.

    x: (..., E)    W: (V, E)    target: (...,) int64 in [0, V), or ignore_index    b: (V,) or None
    class_weights: (V,), of x's dtype or fp32: a weight for each target, with no gradient; all 1 by default
    ignore_index: the target of a row that has none    label_smoothing: in [0, 1] (Szegedy et al., 2016)
    z_loss: times lse^2 is added to a row's loss, as weighted as it (Chowdhery et al., 2022)
    reduction: "mean", the sum over the sum of the targets' weights, or "sum", or "none"
    returns the loss: a scalar, or (...,) with "none"; in fp32 where x is narrower
    with return_details (loss, log_prob, lse, argmax), (...,) each: the log-probability of the target, differentiable,
    and the log-sum-exp of the logits, differentiable, both of that dtype; and the first of the largest logits' places

    What stands in a row without a target does not matter: its gradient is zero, its log_prob and lse 0, its argmax -1.
    The mean over no target is 0 with zero gradients, where torch's is NaN.
    """
    kept = target != ignore_index
    y = torch.where(kept, target, 0)
    x = torch.where(kept[..., None], x, 0)
    logits = x @ W.T if b is None else x @ W.T + b
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32)) / temperature  # (..., V)
    lse = logits.logsumexp(-1)
    log_prob = logits.gather(-1, y[..., None])[..., 0] - lse
    weights = logits.new_ones(len(W)) if class_weights is None else class_weights.detach().to(logits.dtype)
    w = weights[y]

    loss = -(1 - label_smoothing) * w * log_prob + z_loss * w * lse.square()
    if label_smoothing:
        loss = loss + label_smoothing * (weights * (lse[..., None] - logits)).mean(-1)
    loss = torch.where(kept, loss, 0)
    if reduction == "mean":
        norm = torch.where(kept, w, 0).sum()
        loss = loss.sum() / torch.where(norm == 0, math.inf, norm)
    elif reduction == "sum":
        loss = loss.sum()
    if not return_details:
        return loss
    return loss, torch.where(kept, log_prob, 0), torch.where(kept, lse, 0), torch.where(kept, logits.argmax(-1), -1)
