"""The oracles: every operator of `fusedseq.fused` in plain PyTorch, with the same signature.

They define what the operators compute, and every kernel is tested against them. They run in any
dtype on any device, can be differentiated any number of times, and draw the same random masks bit
for bit. They are not written for speed.
"""

from fusedseq.reference.activation_regularization import activation_regularization
from fusedseq.reference.attention import attention
from fusedseq.reference.attention_varlen import attention_varlen
from fusedseq.reference.bias_activation_dropout import bias_activation_dropout
from fusedseq.reference.bidirectional_lstm import bidirectional_lstm
from fusedseq.reference.dropout import dropout
from fusedseq.reference.dropout_mask import dropout_mask
from fusedseq.reference.embedding import embedding
from fusedseq.reference.gru import gru
from fusedseq.reference.layer_norm_gru import layer_norm_gru
from fusedseq.reference.layer_norm_lstm import layer_norm_lstm
from fusedseq.reference.linear import linear
from fusedseq.reference.linear_cross_entropy import linear_cross_entropy
from fusedseq.reference.locked_dropout import locked_dropout
from fusedseq.reference.lstm import lstm
from fusedseq.reference.mogrifier_lstm import mogrifier_lstm
from fusedseq.reference.mogrifier_lstm_pair import mogrifier_lstm_pair
from fusedseq.reference.peephole_lstm import peephole_lstm
from fusedseq.reference.projected_lstm import projected_lstm
from fusedseq.reference.residual_layer_norm import residual_layer_norm
from fusedseq.reference.rnn import rnn
from fusedseq.reference.split_cross_entropy import split_cross_entropy
from fusedseq.reference.weight_drop import weight_drop

__all__ = [
    "activation_regularization",
    "attention",
    "attention_varlen",
    "bias_activation_dropout",
    "bidirectional_lstm",
    "dropout",
    "dropout_mask",
    "embedding",
    "gru",
    "layer_norm_gru",
    "layer_norm_lstm",
    "linear",
    "linear_cross_entropy",
    "locked_dropout",
    "lstm",
    "mogrifier_lstm",
    "mogrifier_lstm_pair",
    "peephole_lstm",
    "projected_lstm",
    "residual_layer_norm",
    "rnn",
    "split_cross_entropy",
    "weight_drop",
]
