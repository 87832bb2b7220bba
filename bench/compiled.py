"""The baselines under torch.compile, same names and signatures.

Of a recurrence the step is compiled and the loop stays in Python: compiled as a whole the loop unrolls into thousands
of operators (README.md has the times). `whole` is for the rows that try it all the same.
"""

import torch

from bench import baselines


def whole(function):
    """The compiled function, of which each new shape is compiled anew instead of being made general."""
    return torch.compile(function, dynamic=False)


attention = whole(baselines.attention_eager)
dropout = whole(baselines.dropout)
locked_dropout = whole(baselines.locked_dropout)
weight_drop = whole(baselines.weight_drop)
embedding = whole(baselines.embedding)
activation_regularization = whole(baselines.activation_regularization)
bias_activation_dropout = whole(baselines.bias_activation_dropout)
residual_layer_norm = whole(baselines.residual_layer_norm)
linear = whole(baselines.linear)
linear_cross_entropy = whole(baselines.linear_cross_entropy)
split_cross_entropy = whole(baselines.split_cross_entropy)
_lstm_step = whole(baselines.lstm_step)
_mogrifier_step = whole(baselines.mogrifier_step)


def lstm(x, W_ih, W_hh, b, h0, c0, lengths=None, *, weight_drop=0.0, variational=False, training=True, seed=None):
    return baselines.run_lstm_loop(_lstm_step, x, W_ih, W_hh, b, h0, c0, lengths, weight_drop, variational, training)


def mogrifier_lstm(
    x, W_ih, W_hh, b, h0, c0, Q, R, Q_bias=None, R_bias=None, *, rounds, lengths=None, cap_input_gate=False,
    input_dropout=0.0, locked_input=False, state_dropout=0.0, zoneout_h=0.0, zoneout_c=0.0, weight_drop=0.0,
    variational=False, training=True, seed=None,
):  # fmt: skip
    return baselines.run_mogrifier_loop(
        _mogrifier_step, x, W_ih, W_hh, b, h0, c0, Q, R, Q_bias, R_bias, rounds, lengths, cap_input_gate,
        input_dropout, locked_input, state_dropout, zoneout_h, zoneout_c, weight_drop, variational, training,
    )  # fmt: skip


def mogrifier_lstm_pair(x, first, second):
    y, state = mogrifier_lstm(x, **first)
    return (y, state), mogrifier_lstm(y, **second)
