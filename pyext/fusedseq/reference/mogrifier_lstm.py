import torch

from fusedseq.reference.dropout import dropout
from fusedseq.reference.dropout_mask import drop, dropout_mask
from fusedseq.reference.locked_dropout import locked_dropout
from fusedseq.reference.weight_drop import weight_drop as drop_weight

# Each random mask of the recurrences has its own Philox key: the operator's seed plus one of these.
INPUT, STATE, ZONEOUT_H, ZONEOUT_C, WEIGHT = 0, 1, 2, 3, 4


def mogrifier_lstm(
    x, W_ih, W_hh, b, h0, c0, Q, R, Q_bias=None, R_bias=None, *, rounds, lengths=None, cap_input_gate=False,
    input_dropout=0.0, locked_input=False, state_dropout=0.0, zoneout_h=0.0, zoneout_c=0.0, weight_drop=0.0,
    variational=False, training=True, seed=0,
):  # fmt: skip
    """A Mogrifier LSTM over a sequence (Melis et al., 2020): x and h gate each other before the LSTM reads them.

        even k:  x = 2 sigmoid(h Q_k^T + b_k) x        odd k:  h = 2 sigmoid(x R_k^T + b_k) h        k = 0 .. rounds-1

    and then the gates i, f, g, o of `lstm` from the mogrified x and h. The state carried on is the raw h.

    x: (T, B, X)    W_ih: (4H, X)    W_hh: (4H, H)    b: (4H,) or None    h0, c0: (B, H)
    Q: (n, X, H), R: (n, H, X): one weight for each even (odd) round, or n = 1: one shared by all of them.
       Low rank: a pair of factors, Q = ((n, X, rank), (n, rank, H)), R = ((n, H, rank), (n, rank, X)).
       None where there is no such round (Q at rounds = 0, R at rounds <= 1).
    Q_bias: (n, X), R_bias: (n, H), or None
    rounds: how many; 0 is an LSTM
    lengths: (B,) int64, in [0, T], or None: steps past a sequence's length leave its state and give zeros
    cap_input_gate: i = min(i, 1 - f), as in the paper's code
    input_dropout: on x, drawn for each step, or once for all steps with `locked_input`
    state_dropout: on h before the rounds, one (B, H) mask for the sequence
    zoneout_h, zoneout_c: probability that a unit keeps its old h (c) at a step (Krueger et al., 2017); where
       not `training`, their expectation instead, and no dropout
    weight_drop, variational: as in `lstm`
    seed: as in `dropout_mask`
    returns y: (T, B, H), (h, c): (B, H) each
    """
    if training and input_dropout:
        x = (locked_dropout if locked_input else dropout)(x, input_dropout, seed + INPUT)
    if training and weight_drop:
        W_hh = drop_weight(W_hh, weight_drop, seed + WEIGHT, variational)
    state_keep = dropout_mask(seed + STATE, state_dropout, h0.shape, h0.device)
    y_shape = (len(x), *h0.shape)
    update_h = dropout_mask(seed + ZONEOUT_H, zoneout_h, y_shape, h0.device)
    update_c = dropout_mask(seed + ZONEOUT_C, zoneout_c, y_shape, h0.device)

    h, c, y = h0, c0, []
    for t, x_t in enumerate(x):
        h_t = drop(h, state_keep, state_dropout) if training and state_dropout else h
        for k in range(rounds):
            if k % 2 == 0:
                x_t = 2 * project(h_t, Q, Q_bias, k // 2).sigmoid() * x_t
            else:
                h_t = 2 * project(x_t, R, R_bias, k // 2).sigmoid() * h_t
        z = x_t @ W_ih.T + h_t @ W_hh.T
        i, f, g, o = (z if b is None else z + b).chunk(4, dim=-1)
        i, f = i.sigmoid(), f.sigmoid()
        if cap_input_gate:
            i = torch.minimum(i, 1 - f)
        c_new = f * c + i * g.tanh()
        h_new = o.sigmoid() * c_new.tanh()
        if zoneout_c:
            c_new = torch.where(update_c[t], c_new, c) if training else zoneout_c * c + (1 - zoneout_c) * c_new
        if zoneout_h:
            h_new = torch.where(update_h[t], h_new, h) if training else zoneout_h * h + (1 - zoneout_h) * h_new
        if lengths is not None:
            alive = (t < lengths)[:, None]
            y.append(torch.where(alive, h_new, 0.0))
            h, c = torch.where(alive, h_new, h), torch.where(alive, c_new, c)
        else:
            y.append(h_new)
            h, c = h_new, c_new
    return torch.stack(y), (h, c)


def project(operand, weight, bias, k):
    """operand times the k-th weight (or its two low-rank factors), transposed, plus the k-th bias."""
    if isinstance(weight, torch.Tensor):
        z = operand @ weight[k % len(weight)].T
    else:
        A, B = weight
        z = operand @ B[k % len(B)].T @ A[k % len(A)].T
    return z if bias is None else z + bias[k % len(bias)]
