from collections.abc import Sequence

from torch import Tensor

from fusedseq.reference.dropout_mask import WEIGHT, ZONEOUT_C, ZONEOUT_H
from fusedseq.reference.steps import State, over_steps, zoneout
from fusedseq.reference.weight_drop import drop_weight


def peephole_lstm(
    x: Tensor,
    W_ih: Tensor,
    W_hh: Tensor,
    b: Tensor | None,
    peephole: Tensor,
    h0: Tensor,
    c0: Tensor,
    lengths: Tensor | Sequence[int] | None = None,
    *,
    starts: Tensor | None = None,
    reverse: bool = False,
    zoneout_h: float = 0.0,
    zoneout_c: float = 0.0,
    weight_drop: float = 0.0,
    variational: bool = False,
    training: bool = True,
    seed: int | Tensor = 0,
) -> tuple[Tensor, tuple[Tensor, Tensor]]:
    """An LSTM whose gates also read the cell state of their unit (Gers & Schmidhuber, 2000): i and
    f the one before the step, o the new one.

        i = sigmoid(W_ii x + W_hi h + b_i + p_i c)
        f = sigmoid(W_if x + W_hf h + b_f + p_f c)
        c' = f c + i tanh(W_ig x + W_hg h + b_g)
        o = sigmoid(W_io x + W_ho h + b_o + p_o c')
        h' = o tanh(c')

    x: (T, B, X)
    W_ih: (4H, X) and W_hh: (4H, H), gates in the order i, f, g, o, as `lstm`
    b: (4H,) or None
    peephole: (3H,): p_i, p_f and p_o
    h0, c0: (B, H)
    lengths, starts, reverse, zoneout_h, zoneout_c, weight_drop, variational, training, seed: as in
        `lstm`
    returns y: (T, B, H), (h, c): (B, H) each
    """
    if training and weight_drop:
        W_hh = drop_weight(WEIGHT, W_hh, weight_drop, seed, variational)
    mix_h = zoneout(ZONEOUT_H, zoneout_h, seed, training, h0.shape, x)
    mix_c = zoneout(ZONEOUT_C, zoneout_c, seed, training, c0.shape, x)
    p_i, p_f, p_o = peephole.chunk(3)

    def step(n: int, x_n: Tensor, state: State) -> State:
        h, c = state
        z = x_n @ W_ih.T + h @ W_hh.T
        i, f, g, o = (z if b is None else z + b).chunk(4, dim=-1)
        c_new = (f + p_f * c).sigmoid() * c + (i + p_i * c).sigmoid() * g.tanh()
        h_new = (o + p_o * c_new).sigmoid() * c_new.tanh()
        return mix_h(n, h_new, h), mix_c(n, c_new, c)

    y, (h, c) = over_steps(step, x, (h0, c0), lengths, starts, reverse)
    return y, (h, c)
