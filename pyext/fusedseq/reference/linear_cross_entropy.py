import math

import torch
from torch import Tensor


def linear_cross_entropy(
    x: Tensor,
    W: Tensor,
    target: Tensor,
    b: Tensor | None = None,
    *,
    class_weights: Tensor | None = None,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    temperature: float = 1.0,
    reduction: str = "mean",
    return_details: bool = False,
) -> Tensor | tuple[Tensor, Tensor, Tensor, Tensor]:
    """The cross-entropy of a linear map: torch.nn.functional.cross_entropy of
    linear(x, W, b) / temperature.

    x: (..., E)
    W: (V, E)
    target: (...,) int64 or int32, in [0, V) or equal to ignore_index
    b: (V,) or None
    class_weights: (V,), of the dtype of x or fp32; the weight of each target, by default 1; it
        receives no gradient
    ignore_index: marks rows without a target
    label_smoothing: in [0, 1] (Szegedy et al., 2016, section 7)
    z_loss: z_loss * lse^2 is added to each row's loss, with the row's weight (Chowdhery et al.,
        2022, section 5)
    temperature: divides the logits
    reduction: "mean", the sum divided by the sum of the targets' weights; "sum"; or "none"
    returns the loss, a scalar, or (...,) with "none", in fp32 where x has 16 bits
    return_details: whether to return (loss, log_prob, lse, argmax) instead, the last three of shape
        (...,): the target's log-probability and the log-sum-exp of the logits, both differentiable
        and of the loss's dtype, and the index of the first largest logit

    The values of a row without a target do not matter: its gradient is 0, its log_prob and lse are
    0, and its argmax is -1. The mean over no target is 0 with zero gradients, where torch returns
    NaN.
    """
    is_target = target != ignore_index
    y = torch.where(is_target, target, 0).long()
    x = torch.where(is_target[..., None], x, 0)
    logits = x @ W.T if b is None else x @ W.T + b
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32)) / temperature  # (..., V)
    lse = logits.logsumexp(-1)
    log_prob = logits.log_softmax(-1).gather(-1, y[..., None])[..., 0]
    weights = (
        logits.new_ones(len(W))
        if class_weights is None
        else class_weights.detach().to(logits.dtype)
    )
    w = weights[y]

    loss = -(1 - label_smoothing) * w * log_prob
    if z_loss:
        loss = loss + z_loss * w * lse.square()
    if label_smoothing:
        loss = loss + label_smoothing * (weights * (lse[..., None] - logits)).mean(-1)
    loss = torch.where(is_target, loss, 0)
    if reduction == "mean":
        norm = torch.where(is_target, w, 0).sum()
        loss = loss.sum() / torch.where(norm == 0, math.inf, norm)
    elif reduction == "sum":
        loss = loss.sum()
    if not return_details:
        return loss
    return (
        loss,
        torch.where(is_target, log_prob, 0),
        torch.where(is_target, lse, 0),
        torch.where(is_target, logits.argmax(-1), -1),
    )
