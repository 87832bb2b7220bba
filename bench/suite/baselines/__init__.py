"""Baselines: every operator as an experienced PyTorch user writes it.

The baselines answer how fast PyTorch is; correctness is the oracle's subject (the pure-PyTorch
definition in `fusedseq.reference` that every kernel is tested against). Their random masks come
from torch's own generator (F.dropout, bernoulli_), so they ignore `seed`, and they call torch's own
operator wherever torch has one. The module can be passed as `ops` to every class of `fusedseq.nn`.
"""

from bench.suite.baselines.attention import attention, attention_eager, attention_varlen
from bench.suite.baselines.elementwise import (
    activation_regularization,
    bias_activation_dropout,
    dropout,
    embedding,
    embedding_rows,
    linear,
    locked_dropout,
    residual_layer_norm,
    weight_drop,
)
from bench.suite.baselines.losses import (
    FastestChunk,
    linear_cross_entropy,
    linear_cross_entropy_chunked,
    split_cross_entropy,
)
from bench.suite.baselines.recurrence import (
    bidirectional_lstm,
    bidirectional_lstm_loop,
    gru,
    gru_loop,
    layer_norm_gru,
    layer_norm_lstm,
    lstm,
    lstm_loop,
    make_gru_loop,
    make_layer_norm_gru_loop,
    make_layer_norm_loop,
    make_lstm_loop,
    make_mogrifier_loop,
    make_peephole_loop,
    mogrifier_lstm,
    mogrifier_lstm_pair,
    peephole_lstm,
    projected_lstm,
    projected_lstm_loop,
    rnn,
    rnn_loop,
)

__all__ = [
    "FastestChunk",
    "activation_regularization",
    "attention",
    "attention_eager",
    "attention_varlen",
    "bias_activation_dropout",
    "bidirectional_lstm",
    "bidirectional_lstm_loop",
    "dropout",
    "embedding",
    "embedding_rows",
    "gru",
    "gru_loop",
    "layer_norm_gru",
    "layer_norm_lstm",
    "linear",
    "linear_cross_entropy",
    "linear_cross_entropy_chunked",
    "locked_dropout",
    "lstm",
    "lstm_loop",
    "make_gru_loop",
    "make_layer_norm_gru_loop",
    "make_layer_norm_loop",
    "make_lstm_loop",
    "make_mogrifier_loop",
    "make_peephole_loop",
    "mogrifier_lstm",
    "mogrifier_lstm_pair",
    "peephole_lstm",
    "projected_lstm",
    "projected_lstm_loop",
    "residual_layer_norm",
    "rnn",
    "rnn_loop",
    "split_cross_entropy",
    "weight_drop",
]
