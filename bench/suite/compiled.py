"""The baselines under torch.compile, with the same names and signatures.

Of a recurrence only the step is compiled and the loop stays in Python: compiled as a whole, the
loop unrolls into thousands of operators (README.md has the compilation times). `compile_whole` is
for the cases that try this.
"""

import torch

from bench.suite import baselines
from bench.suite.baselines import recurrence


def compile_whole(function):
    """Returns the compiled function, which is compiled again for every new shape."""
    return torch.compile(function, dynamic=False)


attention = compile_whole(baselines.attention_eager)
attention_varlen = compile_whole(baselines.attention_varlen)
dropout = compile_whole(baselines.dropout)
locked_dropout = compile_whole(baselines.locked_dropout)
weight_drop = compile_whole(baselines.weight_drop)
embedding = compile_whole(baselines.embedding)
activation_regularization = compile_whole(baselines.activation_regularization)
bias_activation_dropout = compile_whole(baselines.bias_activation_dropout)
residual_layer_norm = compile_whole(baselines.residual_layer_norm)
linear = compile_whole(baselines.linear)
linear_cross_entropy = compile_whole(baselines.linear_cross_entropy)
split_cross_entropy = compile_whole(baselines.split_cross_entropy)
lstm = recurrence.make_lstm_loop(compile_whole(recurrence.lstm_step))
bidirectional_lstm = recurrence.make_bidirectional_loop(lstm)
gru = recurrence.make_gru_loop(compile_whole(recurrence.gru_step))
projected_lstm = recurrence.make_projected_lstm_loop(compile_whole(recurrence.projected_step))
rnn = recurrence.make_rnn_loop(compile_whole(recurrence.rnn_step))
layer_norm_gru = recurrence.make_layer_norm_gru_loop(compile_whole(recurrence.layer_norm_gru_step))
layer_norm_lstm = recurrence.make_layer_norm_loop(compile_whole(recurrence.layer_norm_step))
peephole_lstm = recurrence.make_peephole_loop(compile_whole(recurrence.peephole_step))
mogrifier_lstm = recurrence.make_mogrifier_loop(compile_whole(recurrence.mogrifier_step))


def mogrifier_lstm_pair(x, first, second):
    y, state = mogrifier_lstm(x, **first)
    return (y, state), mogrifier_lstm(y, **second)
