"""Baselines of the recurrent operators: torch's own LSTM, and loops over the steps in Python.

A loop is made from its step function, so that `bench.suite.compiled` can pass a compiled step.
"""

import torch
from torch.nn import functional as F

from bench.suite.baselines.elementwise import dropout, locked_dropout
from bench.suite.baselines.elementwise import weight_drop as apply_weight_drop
from bench.suite.baselines.unsupported import reject_options


def recurrent_weight(W_hh, weight_drop, variational, training):
    """The W_hh that every step uses: masked once, before the loop."""
    if training and weight_drop:
        return apply_weight_drop(W_hh, weight_drop, variational=variational)
    return W_hh


def lstm(
    x,
    W_ih,
    W_hh,
    b,
    h0,
    c0,
    lengths=None,
    *,
    weight_drop=0.0,
    variational=False,
    training=True,
    seed=None,
):
    """torch.nn.LSTM's own operator: oneDNN's on a CPU, cuDNN's on a GPU."""
    reject_options(lengths=lengths)
    W_hh = recurrent_weight(W_hh, weight_drop, variational, training)
    weights = [W_ih, W_hh] if b is None else [W_ih, W_hh, b, torch.zeros_like(b)]
    y, h, c = torch._VF.lstm(
        x, (h0[None], c0[None]), weights, b is not None, 1, 0.0, True, False, False
    )
    return y, (h[0], c[0])


def make_lstm_loop(step):
    """Returns an `lstm` that calls `step`, a function like `lstm_step`, for every time step."""

    def lstm_loop(
        x,
        W_ih,
        W_hh,
        b,
        h0,
        c0,
        lengths=None,
        *,
        weight_drop=0.0,
        variational=False,
        training=True,
        seed=None,
    ):
        """The LSTM as a Python loop: one GEMM for all inputs, then one GEMM per step."""
        reject_options(lengths=lengths)
        W_hh_t = recurrent_weight(W_hh, weight_drop, variational, training).t()
        h, c, y = h0, c0, []
        for z_t in F.linear(x, W_ih, b).unbind():
            h, c = step(z_t, h, c, W_hh_t)
            y.append(h)
        return torch.stack(y), (h, c)

    return lstm_loop


def lstm_step(z, h, c, W_hh_t):
    i, f, g, o = torch.addmm(z, h, W_hh_t).chunk(4, dim=-1)
    c = f.sigmoid() * c + i.sigmoid() * g.tanh()
    return o.sigmoid() * c.tanh(), c


lstm_loop = make_lstm_loop(lstm_step)


def make_mogrifier_loop(step):
    """Returns a `mogrifier_lstm` that calls `step`, a function like `mogrifier_step`."""

    def mogrifier_lstm(
        x,
        W_ih,
        W_hh,
        b,
        h0,
        c0,
        Q,
        R,
        Q_bias=None,
        R_bias=None,
        *,
        rounds,
        lengths=None,
        cap_input_gate=False,
        input_dropout=0.0,
        locked_input=False,
        state_dropout=0.0,
        zoneout_h=0.0,
        zoneout_c=0.0,
        weight_drop=0.0,
        variational=False,
        training=True,
        seed=None,
    ):
        """A Python loop over the steps; weights are unpacked and masks are drawn once, before it.

        Four variants of the gates' product (two F.linear and a sum, one GEMM over [x, h],
        nn.LSTMCell's operator, and this addmm) were timed against each other on a CPU and are equal
        within 5 %.
        """
        reject_options(lengths=lengths)
        T, W_hh_t = len(x), recurrent_weight(W_hh, weight_drop, variational, training).t()
        if training and input_dropout:
            x = (locked_dropout if locked_input else dropout)(x, input_dropout)
        state_mask = None
        if training and state_dropout:
            state_mask = dropout(torch.ones_like(h0), state_dropout)
        mix_h, mix_c = (zoneout_weights(h0, T, p, training) for p in (zoneout_h, zoneout_c))
        weights = [unpack_round(Q, R, Q_bias, R_bias, k) for k in range(rounds)]
        h, c, y = h0, c0, []
        for t, x_t in enumerate(x.unbind()):
            h, c = step(
                x_t, h, c, W_ih, W_hh_t, b, weights, state_mask, mix_h[t], mix_c[t], cap_input_gate
            )
            y.append(h)
        return torch.stack(y), (h, c)

    return mogrifier_lstm


def zoneout_weights(h0, T, p, training):
    """Returns each step's weight of the old state: a random mask, p in evaluation, or None."""
    if training and p:
        return torch.empty_like(h0.expand(T, *h0.shape)).bernoulli_(p).unbind()
    return [p or None] * T


def unpack_round(Q, R, Q_bias, R_bias, k):
    """Returns round k's [weight], or [its two factors as they are applied], and its bias."""
    weight, bias = (R, R_bias) if k % 2 else (Q, Q_bias)
    factors = [weight] if isinstance(weight, torch.Tensor) else weight[::-1]
    return [w[k // 2 % len(w)] for w in factors], None if bias is None else bias[k // 2 % len(bias)]


def mogrifier_step(x, h, c, W_ih, W_hh_t, b, weights, state_mask, mix_h, mix_c, cap_input_gate):
    """One step: the rounds gate x and h alternately, then an LSTM cell, then zoneout."""
    h_new, c_new = h if state_mask is None else h * state_mask, c
    for k, (factors, bias) in enumerate(weights):
        z = h_new if k % 2 == 0 else x
        for W in factors[:-1]:
            z = F.linear(z, W)
        gate = 2 * F.linear(z, factors[-1], bias).sigmoid()
        if k % 2 == 0:
            x = gate * x
        else:
            h_new = gate * h_new
    i, f, g, o = torch.addmm(F.linear(x, W_ih, b), h_new, W_hh_t).chunk(4, dim=-1)
    i, f = i.sigmoid(), f.sigmoid()
    if cap_input_gate:
        i = torch.minimum(i, 1 - f)
    c_new = f * c + i * g.tanh()
    h_new = o.sigmoid() * c_new.tanh()
    if mix_c is not None:
        c_new = torch.lerp(c_new, c, mix_c)
    if mix_h is not None:
        h_new = torch.lerp(h_new, h, mix_h)
    return h_new, c_new


mogrifier_lstm = make_mogrifier_loop(mogrifier_step)


def mogrifier_lstm_pair(x, first, second):
    """The second layer after the first; each layer's arguments are given as a dict."""
    y, state = mogrifier_lstm(x, **first)
    return (y, state), mogrifier_lstm(y, **second)
