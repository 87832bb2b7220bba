import torch
from torch import nn

from fusedseq import fused
from fusedseq.reference.split_cross_entropy import log_prob


class SplitCrossEntropy(nn.Module):
    """The loss of an output layer, over the whole vocabulary or, with `splits`, over a head of frequent words and tails.

    in_features: E    splits: where the vocabulary is cut, as in `fusedseq.reference.split_cross_entropy`; none: the plain
    cross-entropy, without parameters of its own    bias: of the tombstones    ignore_index: the target of a row without one
    forward: x (..., E), target (...,) int64 in [0, V), weight (V, E), bias (V,) or None, reduction "mean", "sum" or
    "none" -> a scalar, or (...,) with "none"
    The weight is an argument, so that it can be an embedding's; `tombstones` (K, E) and `tombstone_bias` (K,) are parameters,
    zeros at first, so that they go wherever a model's parameters go. The `state_dict` of AWD-LSTM's SplitCrossEntropyLoss loads: its
    tail_vectors and tail_bias are the tombstones in reverse.
    """

    def __init__(self, in_features, splits=(), bias=True, *, ignore_index=-100, device=None, dtype=None, ops=fused):
        super().__init__()
        self.splits, self.ignore_index = tuple(splits), ignore_index
        self._split_cross_entropy = ops.split_cross_entropy
        K, make = len(self.splits), {"device": device, "dtype": dtype}
        self.tombstones = nn.Parameter(torch.zeros(K, in_features, **make)) if K else None
        self.tombstone_bias = nn.Parameter(torch.zeros(K, **make)) if K and bias else None
        self.register_load_state_dict_pre_hook(from_awd_lstm)

    def forward(self, x, target, weight, bias=None, reduction="mean"):
        return self._split_cross_entropy(
            x, weight, target, self.tombstones, self.splits, bias, self.tombstone_bias,
            ignore_index=self.ignore_index, reduction=reduction,
        )  # fmt: skip

    def log_prob(self, x, weight, bias=None):
        """The log-probability of every word: (..., V), which is in memory then."""
        return log_prob(x, weight, self.tombstones, self.splits, bias, self.tombstone_bias)

    def extra_repr(self):
        return f"splits={self.splits}"


def from_awd_lstm(module, state, prefix, *args):
    """The code of AWD-LSTM counts the tombstones from the end of the head."""
    for old, new in (("tail_vectors", "tombstones"), ("tail_bias", "tombstone_bias")):
        if prefix + old in state:
            state[prefix + new] = state.pop(prefix + old).flip(0)
