from collections.abc import Sequence

import torch
from torch import Tensor

from fusedseq.reference.dropout import dropout
from fusedseq.reference.dropout_mask import STATE, WEIGHT, ZONEOUT_C, ZONEOUT_H, drop, stream_mask
from fusedseq.reference.locked_dropout import locked_dropout
from fusedseq.reference.steps import State, over_steps, zoneout
from fusedseq.reference.weight_drop import drop_weight

Weight = Tensor | tuple[Tensor, Tensor]  # of the rounds: full rank, or two low-rank factors


def mogrifier_lstm(
    x: Tensor,
    W_ih: Tensor,
    W_hh: Tensor,
    b: Tensor | None,
    h0: Tensor,
    c0: Tensor,
    Q: Weight | None,
    R: Weight | None,
    Q_bias: Tensor | None = None,
    R_bias: Tensor | None = None,
    *,
    rounds: int,
    lengths: Tensor | Sequence[int] | None = None,
    starts: Tensor | None = None,
    reverse: bool = False,
    cap_input_gate: bool = False,
    input_dropout: float = 0.0,
    locked_input: bool = False,
    state_dropout: float = 0.0,
    zoneout_h: float = 0.0,
    zoneout_c: float = 0.0,
    weight_drop: float = 0.0,
    variational: bool = False,
    training: bool = True,
    seed: int | Tensor = 0,
) -> tuple[Tensor, tuple[Tensor, Tensor]]:
    """A Mogrifier LSTM over a sequence (Melis et al., 2020, equations 1 to 3): before each step of
    an LSTM, x and h gate each other.

        even k:  x = 2 sigmoid(h Q_k^T + b_k) x        odd k:  h = 2 sigmoid(x R_k^T + b_k) h
        for k = 0 .. rounds - 1

    The gates i, f, g, o of `lstm` are then computed from the new x and h. The state that is carried
    to the next step is the raw h, before any round.

    x: (T, B, X)
    W_ih: (4H, X)
    W_hh: (4H, H)
    b: (4H,) or None
    h0, c0: (B, H)
    Q: (n, X, H) and R: (n, H, X): n is the number of even (odd) rounds, with a weight for each, or
        1, with a weight for all of them. A low-rank weight is a pair of factors,
        Q = ((n, X, rank), (n, rank, H)) and R = ((n, H, rank), (n, rank, X)). None where there is
        no such round: Q if rounds is 0, R if rounds is at most 1.
    Q_bias: (n, X) and R_bias: (n, H), or None
    rounds: the number of rounds; with 0 this is an LSTM
    lengths, starts, reverse: as in `lstm`. Zoneout's masks count the steps in the order in which
        they are computed; the other masks are those of the forward order.
    cap_input_gate: whether i = min(i, 1 - f), as in the paper's code
    input_dropout: probability for x, with a mask for each time step
    locked_input: whether that mask is the same for all time steps
    state_dropout: probability for h before the rounds, with one (B, H) mask for the sequence
    zoneout_h, zoneout_c: probability that a unit keeps its old h (c) at a step (Krueger et al.,
        2017)
    weight_drop, variational: as in `lstm`
    training: whether the dropouts apply; without it a zoneout is replaced by its expectation
    seed: as in `dropout_mask`. Calls with one seed, as with the default, draw one mask
    returns y: (T, B, H), (h, c): (B, H) each
    """
    if training and input_dropout:
        x = (locked_dropout if locked_input else dropout)(x, input_dropout, seed)
    if training and weight_drop:
        W_hh = drop_weight(WEIGHT, W_hh, weight_drop, seed, variational)
    state_keep = None
    if training and state_dropout:
        state_keep = stream_mask(STATE, seed, state_dropout, h0.shape, h0.device)
    mix_h = zoneout(ZONEOUT_H, zoneout_h, seed, training, h0.shape, x)
    mix_c = zoneout(ZONEOUT_C, zoneout_c, seed, training, c0.shape, x)

    def step(n: int, x_n: Tensor, state: State) -> State:
        h, c = state
        h_n = h if state_keep is None else drop(h, state_keep, state_dropout)
        for k in range(rounds):
            if k % 2 == 0:
                x_n = 2 * project(h_n, Q, Q_bias, k // 2).sigmoid() * x_n
            else:
                h_n = 2 * project(x_n, R, R_bias, k // 2).sigmoid() * h_n
        z = x_n @ W_ih.T + h_n @ W_hh.T
        i, f, g, o = (z if b is None else z + b).chunk(4, dim=-1)
        i, f = i.sigmoid(), f.sigmoid()
        if cap_input_gate:
            i = torch.minimum(i, 1 - f)
        c_new = f * c + i * g.tanh()
        h_new = o.sigmoid() * c_new.tanh()
        return mix_h(n, h_new, h), mix_c(n, c_new, c)

    y, (h, c) = over_steps(step, x, (h0, c0), lengths, starts, reverse)
    return y, (h, c)


def project(operand: Tensor, weight: Weight | None, bias: Tensor | None, k: int) -> Tensor:
    """Returns operand W_k^T + b_k; W_k is the k-th weight, or the product of its two factors."""
    assert weight is not None
    if isinstance(weight, (tuple, list)):
        A, B = weight
        z = operand @ B[k % len(B)].T @ A[k % len(A)].T
    else:
        z = operand @ weight[k % len(weight)].T
    return z if bias is None else z + bias[k % len(bias)]
