"""The case table: small inputs of every operator, one file per operator."""

from fusedseq.testing.cases import (
    activation_regularization,
    attention,
    attention_varlen,
    bias_activation_dropout,
    bidirectional_lstm,
    dropout,
    dropout_mask,
    embedding,
    hidden_state,
    linear,
    linear_cross_entropy,
    locked_dropout,
    lstm,
    lstm_with_vectors,
    mogrifier_lstm,
    mogrifier_lstm_pair,
    projected_lstm,
    residual_layer_norm,
    split_cross_entropy,
    weight_drop,
)
from fusedseq.testing.cases.case import Case

MODULES = (
    lstm,
    mogrifier_lstm,
    mogrifier_lstm_pair,
    bidirectional_lstm,
    hidden_state,
    lstm_with_vectors,
    projected_lstm,
    dropout,
    locked_dropout,
    weight_drop,
    embedding,
    attention,
    attention_varlen,
    linear,
    linear_cross_entropy,
    split_cross_entropy,
    activation_regularization,
    residual_layer_norm,
    bias_activation_dropout,
    dropout_mask,
)
CASES: list[Case] = [case for module in MODULES for case in module.CASES]
