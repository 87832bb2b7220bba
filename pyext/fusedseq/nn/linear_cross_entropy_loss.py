"""The module over the operator `linear_cross_entropy`: an output layer with its loss."""

import torch
from torch import Tensor, nn

from fusedseq import fused
from fusedseq.nn.operators import Operators, shown_options


class LinearCrossEntropyLoss(nn.Module):
    """An output layer and the cross-entropy of its logits, which are not kept for backward.

    It has the interface of torch.nn.LinearCrossEntropyLoss (since torch 2.13), whose `state_dict`
    it loads, and takes x and target of any shape. It has no `out_features`, no targets that are
    probabilities, and no `options`: the operator chooses how many logits are computed at once.

    in_features: E    num_classes: V
    bias: whether the logits have a bias
    device, dtype: of the parameters, as in torch
    reduction: "mean", "sum" or "none"
    weight: (V,), the weights of the classes; None for 1
    ignore_index: the target of a row without a target; None for -100
    label_smoothing: in [0, 1]
    z_loss: the factor of the mean of the squared log-sum-exps    temperature: divides the logits
    ops: `fusedseq.fused` or `fusedseq.reference`
    forward: x (..., E), target (...,) int64 or int32 in [0, V) -> a scalar, or (...,) with
        reduction "none", in nats

    The output layer is `linear`, a torch.nn.Linear. `loss.linear.weight = embedding.weight` ties it
    to an embedding. Its logits, for a prediction, are `loss.linear(x)`.
    Errors: ValueError for class weights of another shape; those of the operator.
    """

    weight: Tensor | None

    def __init__(
        self,
        in_features: int,
        num_classes: int,
        *,
        bias: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        reduction: str = "mean",
        weight: Tensor | None = None,
        ignore_index: int | None = None,
        label_smoothing: float = 0.0,
        z_loss: float = 0.0,
        temperature: float = 1.0,
        ops: Operators = fused,
    ) -> None:
        super().__init__()
        if weight is not None and weight.shape != (num_classes,):
            raise ValueError(
                f"LinearCrossEntropyLoss: weight must be (num_classes,) = ({num_classes},), got "
                f"{tuple(weight.shape)}"
            )
        self.in_features, self.num_classes, self.bias = in_features, num_classes, bias
        self.reduction, self.ignore_index = reduction, ignore_index
        self.label_smoothing, self.z_loss, self.temperature = label_smoothing, z_loss, temperature
        self.register_buffer("weight", weight)
        self.linear = nn.Linear(in_features, num_classes, bias=bias, device=device, dtype=dtype)
        self._linear_cross_entropy = ops.linear_cross_entropy

    def reset_parameters(self) -> None:
        """Draws the parameters as torch.nn.Linear does."""
        self.linear.reset_parameters()

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        """Returns the loss in nats: a scalar, or (...,) with reduction "none"."""
        loss: Tensor = self._linear_cross_entropy(
            x,
            self.linear.weight,
            target,
            self.linear.bias,
            class_weights=self.weight,
            ignore_index=-100 if self.ignore_index is None else self.ignore_index,
            label_smoothing=self.label_smoothing,
            z_loss=self.z_loss,
            temperature=self.temperature,
            reduction=self.reduction,
        )
        return loss

    def extra_repr(self) -> str:
        return shown_options(self, weight=None if self.weight is None else tuple(self.weight.shape))
