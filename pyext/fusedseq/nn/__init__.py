"""Modules that hold parameters and state and call the operators.

Each module takes its operators as the argument `ops`: `fusedseq.fused` (the default) or
`fusedseq.reference`. Parameters, initialization, `state_dict` and random masks are the same for
both, so a checkpoint can be moved from one to the other.
"""

from fusedseq.nn.absolute_positions import LearnedPositions, SinusoidalPositions
from fusedseq.nn.dropout import Dropout, LockedDropout, WeightDrop
from fusedseq.nn.embedding import Embedding
from fusedseq.nn.feed_forward import FeedForward
from fusedseq.nn.gru import GRU
from fusedseq.nn.key_value_cache import KeyValueCache
from fusedseq.nn.layer_norm_gru import LayerNormGRU
from fusedseq.nn.layer_norm_lstm import LayerNormLSTM
from fusedseq.nn.linear_cross_entropy_loss import LinearCrossEntropyLoss
from fusedseq.nn.lstm import LSTM
from fusedseq.nn.mogrifier_lstm import MogrifierLSTM
from fusedseq.nn.multihead_attention import MultiheadAttention
from fusedseq.nn.operators import Operators
from fusedseq.nn.peephole_lstm import PeepholeLSTM
from fusedseq.nn.relative_positions import ALiBi, RelativeBias, RelativeKeys, Rotary
from fusedseq.nn.residual_layer_norm import ResidualLayerNorm
from fusedseq.nn.rnn import RNN
from fusedseq.nn.split_cross_entropy import SplitCrossEntropy
from fusedseq.nn.transformer_layer import TransformerDecoderLayer, TransformerEncoderLayer

__all__ = [
    "GRU",
    "LSTM",
    "RNN",
    "ALiBi",
    "Dropout",
    "Embedding",
    "FeedForward",
    "KeyValueCache",
    "LayerNormGRU",
    "LayerNormLSTM",
    "LearnedPositions",
    "LinearCrossEntropyLoss",
    "LockedDropout",
    "MogrifierLSTM",
    "MultiheadAttention",
    "Operators",
    "PeepholeLSTM",
    "RelativeBias",
    "RelativeKeys",
    "ResidualLayerNorm",
    "Rotary",
    "SinusoidalPositions",
    "SplitCrossEntropy",
    "TransformerDecoderLayer",
    "TransformerEncoderLayer",
    "WeightDrop",
]
