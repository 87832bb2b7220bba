"""Modules over the operators: parameters and state. Each takes its operators as `ops`: `fusedseq.fused` (the
default) or `fusedseq.reference`; parameters, initialisation, `state_dict` and random masks are the same for both."""

from fusedseq.nn.dropout import Dropout, LockedDropout, WeightDrop
from fusedseq.nn.embedding import Embedding
from fusedseq.nn.feed_forward import FeedForward
from fusedseq.nn.recurrent import LSTM, MogrifierLSTM
from fusedseq.nn.residual_layer_norm import ResidualLayerNorm

__all__ = [
    "LSTM",
    "Dropout",
    "Embedding",
    "FeedForward",
    "LockedDropout",
    "MogrifierLSTM",
    "ResidualLayerNorm",
    "WeightDrop",
]
