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
    starts=None,
    reverse=False,
    zoneout_h=0.0,
    zoneout_c=0.0,
    weight_drop=0.0,
    variational=False,
    training=True,
    seed=None,
):
    """torch.nn.LSTM's own operator: oneDNN's on a CPU, cuDNN's on a GPU."""
    reject_options(starts=starts, reverse=reverse or None, lengths=lengths)
    reject_options(zoneout_h=zoneout_h or None, zoneout_c=zoneout_c or None)
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
        starts=None,
        reverse=False,
        zoneout_h=0.0,
        zoneout_c=0.0,
        weight_drop=0.0,
        variational=False,
        training=True,
        seed=None,
    ):
        """The LSTM as a Python loop: one GEMM for all inputs, then one GEMM per step."""
        reject_options(reverse=reverse or None, lengths=lengths)
        reject_options(zoneout_h=zoneout_h or None, zoneout_c=zoneout_c or None)
        W_hh_t = recurrent_weight(W_hh, weight_drop, variational, training).t()
        h, c, y = h0, c0, []
        for t, z_t in enumerate(F.linear(x, W_ih, b).unbind()):
            if starts is not None:
                h, c = (s.masked_fill(starts[t][:, None], 0.0) for s in (h, c))
            h, c = step(z_t, h, c, W_hh_t)
            y.append(h)
        return torch.stack(y), (h, c)

    return lstm_loop


def lstm_step(z, h, c, W_hh_t):
    i, f, g, o = torch.addmm(z, h, W_hh_t).chunk(4, dim=-1)
    c = f.sigmoid() * c + i.sigmoid() * g.tanh()
    return o.sigmoid() * c.tanh(), c


lstm_loop = make_lstm_loop(lstm_step)


def make_bidirectional_loop(loop):
    """Returns a `bidirectional_lstm` of two calls of `loop`, an LSTM in one direction."""

    def bidirectional_lstm_loop(x, *tensors):
        """tensors: W_ih, W_hh, b, h0, c0 of each direction"""
        y, state = loop(x, *tensors[:5])
        y_reverse, state_reverse = loop(x.flip(0), *tensors[5:])
        return torch.cat([y, y_reverse.flip(0)], -1), (state, state_reverse)

    return bidirectional_lstm_loop


bidirectional_lstm_loop = make_bidirectional_loop(lstm_loop)


def bidirectional_lstm(x, *tensors):
    """torch.nn.LSTM's own operator in both directions. tensors: W_ih, W_hh, b, h0, c0 of each"""
    forward, reverse = tensors[:5], tensors[5:]
    weights = []
    for W_ih, W_hh, b, _, _ in (forward, reverse):
        weights += [W_ih, W_hh, b, torch.zeros_like(b)]
    states = tuple(torch.stack(pair) for pair in zip(forward[3:], reverse[3:], strict=True))
    y, h, c = torch._VF.lstm(x, states, weights, True, 1, 0.0, True, True, False)
    return y, tuple(zip(h, c, strict=True))


def split_bias(b, H):
    """torch.nn.GRU's two biases from the operator's one."""
    return [b[: 3 * H], F.pad(b[3 * H :], (2 * H, 0))]


def gru(
    x,
    W_ih,
    W_hh,
    b,
    h0,
    lengths=None,
    *,
    starts=None,
    reverse=False,
    weight_drop=0.0,
    variational=False,
    training=True,
    seed=None,
):
    """torch.nn.GRU's own operator: a loop of aten's on a CPU, cuDNN's on a GPU."""
    reject_options(lengths=lengths, starts=starts, reverse=reverse or None)
    W_hh = recurrent_weight(W_hh, weight_drop, variational, training)
    weights = [W_ih, W_hh, *([] if b is None else split_bias(b, h0.size(1)))]
    y, h = torch._VF.gru(x, h0[None], weights, b is not None, 1, 0.0, True, False, False)
    return y, h[0]


def rnn(
    x,
    W_ih,
    W_hh,
    b,
    h0,
    lengths=None,
    *,
    relu=False,
    starts=None,
    reverse=False,
    weight_drop=0.0,
    variational=False,
    training=True,
    seed=None,
):
    """torch.nn.RNN's own operator."""
    reject_options(lengths=lengths, starts=starts, reverse=reverse or None)
    W_hh = recurrent_weight(W_hh, weight_drop, variational, training)
    weights = [W_ih, W_hh] if b is None else [W_ih, W_hh, b, torch.zeros_like(b)]
    function = torch._VF.rnn_relu if relu else torch._VF.rnn_tanh
    y, h = function(x, h0[None], weights, b is not None, 1, 0.0, True, False, False)
    return y, h[0]


def make_gru_loop(step):
    """Returns a `gru` that calls `step`, a function like `gru_step`, for every time step."""

    def gru_loop(x, W_ih, W_hh, b, h0):
        """The GRU as a Python loop: one GEMM for all inputs, then one GEMM per step."""
        b_ih, b_hh = split_bias(b, h0.size(1))
        W_hh_t, h, y = W_hh.t(), h0, []
        for from_x in F.linear(x, W_ih, b_ih).unbind():
            h = step(from_x, h, W_hh_t, b_hh)
            y.append(h)
        return torch.stack(y), h

    return gru_loop


def gru_step(from_x, h, W_hh_t, b_hh):
    from_h = torch.addmm(b_hh, h, W_hh_t)
    (x_r, x_z, x_n), (h_r, h_z, h_n) = from_x.chunk(3, dim=-1), from_h.chunk(3, dim=-1)
    n = (x_n + (x_r + h_r).sigmoid() * h_n).tanh()
    return n + (x_z + h_z).sigmoid() * (h - n)


gru_loop = make_gru_loop(gru_step)


def make_rnn_loop(step):
    """Returns an `rnn` with tanh that calls `step`, a function like `rnn_step`, for every time
    step."""

    def rnn_loop(x, W_ih, W_hh, b, h0):
        """The RNN as a Python loop: one GEMM for all inputs, then one GEMM per step."""
        W_hh_t, h, y = W_hh.t(), h0, []
        for z in F.linear(x, W_ih, b).unbind():
            h = step(z, h, W_hh_t)
            y.append(h)
        return torch.stack(y), h

    return rnn_loop


def rnn_step(z, h, W_hh_t):
    return torch.addmm(z, h, W_hh_t).tanh()


rnn_loop = make_rnn_loop(rnn_step)


def make_peephole_loop(step):
    """Returns a `peephole_lstm` that calls `step`, a function like `peephole_step`, for every time
    step."""

    def peephole_lstm(x, W_ih, W_hh, b, peephole, h0, c0):
        """One GEMM for all inputs, then one GEMM per step."""
        W_hh_t, peepholes = W_hh.t(), peephole.chunk(3)
        h, c, y = h0, c0, []
        for z_t in F.linear(x, W_ih, b).unbind():
            h, c = step(z_t, h, c, W_hh_t, *peepholes)
            y.append(h)
        return torch.stack(y), (h, c)

    return peephole_lstm


def peephole_step(z, h, c, W_hh_t, p_i, p_f, p_o):
    i, f, g, o = torch.addmm(z, h, W_hh_t).chunk(4, dim=-1)
    c = torch.addcmul(f, p_f, c).sigmoid() * c + torch.addcmul(i, p_i, c).sigmoid() * g.tanh()
    return torch.addcmul(o, p_o, c).sigmoid() * c.tanh(), c


peephole_lstm = make_peephole_loop(peephole_step)


def projected_lstm(x, W_ih, W_hh, W_hr, b, h0, c0):
    """torch.nn.LSTM's own operator with a projection."""
    weights = [W_ih, W_hh, b, torch.zeros_like(b), W_hr]
    y, h, c = torch._VF.lstm(x, (h0[None], c0[None]), weights, True, 1, 0.0, True, False, False)
    return y, (h[0], c[0])


def make_projected_lstm_loop(step):
    """Returns a `projected_lstm` that calls `step`, a function like `projected_step`, for every
    time step."""

    def projected_lstm_loop(x, W_ih, W_hh, W_hr, b, h0, c0):
        """One GEMM for all inputs, then two GEMMs per step."""
        W_hh_t, W_hr_t = W_hh.t(), W_hr.t()
        h, c, y = h0, c0, []
        for z_t in F.linear(x, W_ih, b).unbind():
            h, c = step(z_t, h, c, W_hh_t, W_hr_t)
            y.append(h)
        return torch.stack(y), (h, c)

    return projected_lstm_loop


def projected_step(z, h, c, W_hh_t, W_hr_t):
    h, c = lstm_step(z, h, c, W_hh_t)
    return h @ W_hr_t, c


projected_lstm_loop = make_projected_lstm_loop(projected_step)


def make_layer_norm_loop(step):
    """Returns a `layer_norm_lstm` that calls `step`, a function like `layer_norm_step`, for every
    time step."""

    def layer_norm_lstm(x, W_ih, W_hh, b, gamma_ih, gamma_hh, gamma_c, beta_c, h0, c0, *, eps=1e-5):
        """One GEMM and one layer norm for all inputs, then one GEMM per step."""
        W_hh_t = W_hh.t()
        h, c, y = h0, c0, []
        for z_t in F.layer_norm(x @ W_ih.t(), gamma_ih.shape, gamma_ih, b, eps).unbind():
            h, c = step(z_t, h, c, W_hh_t, gamma_hh, gamma_c, beta_c, eps)
            y.append(h)
        return torch.stack(y), (h, c)

    return layer_norm_lstm


def layer_norm_step(z, h, c, W_hh_t, gamma_hh, gamma_c, beta_c, eps):
    z = z + F.layer_norm(h @ W_hh_t, gamma_hh.shape, gamma_hh, None, eps)
    i, f, g, o = z.chunk(4, dim=-1)
    c = f.sigmoid() * c + i.sigmoid() * g.tanh()
    return o.sigmoid() * F.layer_norm(c, gamma_c.shape, gamma_c, beta_c, eps).tanh(), c


layer_norm_lstm = make_layer_norm_loop(layer_norm_step)


def make_layer_norm_gru_loop(step):
    """Returns a `layer_norm_gru` that calls `step`, a function like `layer_norm_gru_step`, for
    every time step."""

    def layer_norm_gru(x, W_ih, W_hh, b, gamma_ih, gamma_hh, h0, *, eps=1e-5):
        """One GEMM and one layer norm for all inputs, then one GEMM per step."""
        b_ih, b_hh = (None, None) if b is None else split_bias(b, h0.size(1))
        W_hh_t, h, y = W_hh.t(), h0, []
        for from_x in F.layer_norm(x @ W_ih.t(), gamma_ih.shape, gamma_ih, b_ih, eps).unbind():
            h = step(from_x, h, W_hh_t, gamma_hh, b_hh, eps)
            y.append(h)
        return torch.stack(y), h

    return layer_norm_gru


def layer_norm_gru_step(from_x, h, W_hh_t, gamma_hh, b_hh, eps):
    from_h = F.layer_norm(h @ W_hh_t, gamma_hh.shape, gamma_hh, b_hh, eps)
    (x_r, x_z, x_n), (h_r, h_z, h_n) = from_x.chunk(3, dim=-1), from_h.chunk(3, dim=-1)
    n = (x_n + (x_r + h_r).sigmoid() * h_n).tanh()
    return n + (x_z + h_z).sigmoid() * (h - n)


layer_norm_gru = make_layer_norm_gru_loop(layer_norm_gru_step)


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
        starts=None,
        reverse=False,
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
        reject_options(starts=starts, reverse=reverse or None, lengths=lengths)
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
