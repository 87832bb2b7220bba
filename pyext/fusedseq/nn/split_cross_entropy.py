"""The module over the operator `split_cross_entropy`: the loss of an output layer."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from fusedseq import fused
from fusedseq.fused.split_cross_entropy import whole_numbers
from fusedseq.nn.operators import Operators, shown_options
from fusedseq.reference.split_cross_entropy import log_prob


class SplitCrossEntropy(nn.Module):
    """The cross-entropy of an output layer, over the whole vocabulary or over a head and tails.

    With `splits` the loss is factored into a softmax over a head of frequent words and softmaxes
    over tails of rarer words, as in AWD-LSTM (Merity et al., 2018). Without splits it is the plain
    cross-entropy, and the module has no parameters.

    in_features: E
    splits: the ids at which the vocabulary is cut, as in `fusedseq.reference.split_cross_entropy`
    bias: whether the tombstones have a bias    ignore_index: the target of a row without a target
    device, dtype: of the parameters, as in torch    ops: `fusedseq.fused` or `fusedseq.reference`
    forward: x (..., E), target (...,) int64 or int32 in [0, V), weight (V, E), bias (V,) or None,
        reduction "mean", "sum" or "none" -> a scalar, or (...,) with "none"

    The output weight is an argument of forward, because it may be an embedding's. The parameters
    `tombstones` (K, E) and `tombstone_bias` (K,) are initialized with zeros. The `state_dict` of
    AWD-LSTM's SplitCrossEntropyLoss can be loaded: its tail_vectors and tail_bias are the
    tombstones in reverse order.
    """

    def __init__(
        self,
        in_features: int,
        splits: Sequence[int] = (),
        bias: bool = True,
        *,
        ignore_index: int = -100,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        ops: Operators = fused,
    ) -> None:
        super().__init__()
        self.in_features, self.bias = in_features, bias
        self.splits = whole_numbers("SplitCrossEntropy", splits)
        self.ignore_index = ignore_index
        self._split_cross_entropy = ops.split_cross_entropy
        K = len(self.splits)
        tombstones = torch.empty(K, in_features, device=device, dtype=dtype)
        tombstone_bias = torch.empty(K, device=device, dtype=dtype)
        self.tombstones = nn.Parameter(tombstones) if K else None
        self.tombstone_bias = nn.Parameter(tombstone_bias) if K and bias else None
        # torch has no annotation of this method
        self.register_load_state_dict_pre_hook(from_awd_lstm)  # type: ignore[no-untyped-call]
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Sets the tombstones and their bias to 0."""
        for parameter in self.parameters():
            nn.init.zeros_(parameter)

    def forward(
        self,
        x: Tensor,
        target: Tensor,
        weight: Tensor,
        bias: Tensor | None = None,
        reduction: str = "mean",
    ) -> Tensor:
        """Returns the loss in nats: a scalar, or (...,) with reduction "none"."""
        return self._split_cross_entropy(
            x,
            weight,
            target,
            self.tombstones,
            self.splits,
            bias,
            self.tombstone_bias,
            ignore_index=self.ignore_index,
            reduction=reduction,
        )

    def log_prob(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """Returns the log-probability of every word, (..., V), which this allocates in memory."""
        result: Tensor = log_prob(
            x, weight, self.tombstones, self.splits, bias, self.tombstone_bias
        )
        return result

    def extra_repr(self) -> str:
        return shown_options(self)


def from_awd_lstm(module: nn.Module, state: dict[str, Any], prefix: str, *args: Any) -> None:
    """Renames the entries of an AWD-LSTM state dict and reverses their order.

    AWD-LSTM numbers the tombstones from the end of the head. A hook of load_state_dict.
    """
    for old, new in (("tail_vectors", "tombstones"), ("tail_bias", "tombstone_bias")):
        if prefix + old in state:
            state[prefix + new] = state.pop(prefix + old).flip(0)
