"""The replacement of torch.nn.LinearCrossEntropyLoss, which torch has since 2.13."""

from typing import Any

import torch
from torch import Tensor, nn

from fusedseq import fused
from fusedseq.acceleration.torch_modules import is_supported

KINDS: dict[type[nn.Module], type[nn.Module]] = {}  # {torch's class: its replacement}

if hasattr(nn, "LinearCrossEntropyLoss"):

    class LinearCrossEntropyLoss(nn.LinearCrossEntropyLoss):
        """torch.nn.LinearCrossEntropyLoss over the operator `linear_cross_entropy`.

        The operator chooses how many logits are computed at once, whatever `options` says. Losses
        of several dimensions (`out_features`) and targets that are probabilities are torch's.
        """

        def forward(self, input: Tensor, target: Tensor) -> Tensor:
            layer = self.linear
            if self.out_features or not has_operator(input, layer.weight, target):
                return super().forward(input, target)
            loss: Tensor = fused.linear_cross_entropy(
                input,
                layer.weight,
                target,
                layer.bias,
                class_weights=self.weight,
                ignore_index=-100 if self.ignore_index is None else self.ignore_index,
                label_smoothing=self.label_smoothing,
                reduction=self.reduction,
            )
            return loss

    KINDS[nn.LinearCrossEntropyLoss] = LinearCrossEntropyLoss


def has_operator(x: Any, W: Any, target: Any) -> bool:
    """Returns whether the operator computes a loss as torch does: of x (E,) or (N, E) and the
    numbers of classes.
    """
    if not (is_supported(x) and is_supported(W)):
        return False
    is_class = isinstance(target, Tensor) and target.dtype == torch.int64
    return is_class and x.dim() in (1, 2) and target.shape == x.shape[:-1]
