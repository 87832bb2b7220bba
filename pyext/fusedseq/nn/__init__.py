"""Modules over the operators: parameters and state. Each takes its operators as `ops`: `fusedseq.fused` (the
default) or `fusedseq.reference`; parameters, initialisation, `state_dict` and random masks are the same for both."""

from fusedseq.nn.absolute_positions import LearnedPositions, SinusoidalPositions
from fusedseq.nn.dropout import Dropout, LockedDropout, WeightDrop
from fusedseq.nn.embedding import Embedding
from fusedseq.nn.feed_forward import FeedForward
from fusedseq.nn.key_value_cache import KeyValueCache
from fusedseq.nn.multihead_attention import MultiheadAttention
from fusedseq.nn.recurrent import LSTM, MogrifierLSTM
from fusedseq.nn.relative_positions import ALiBi, RelativeBias, RelativeKeys, Rotary
from fusedseq.nn.residual_layer_norm import ResidualLayerNorm
from fusedseq.nn.split_cross_entropy import SplitCrossEntropy

__all__ = [
    "LSTM",
    "ALiBi",
    "Dropout",
    "Embedding",
    "FeedForward",
    "KeyValueCache",
    "LearnedPositions",
    "LockedDropout",
    "MogrifierLSTM",
    "MultiheadAttention",
    "RelativeBias",
    "RelativeKeys",
    "ResidualLayerNorm",
    "Rotary",
    "SinusoidalPositions",
    "SplitCrossEntropy",
    "WeightDrop",
]
