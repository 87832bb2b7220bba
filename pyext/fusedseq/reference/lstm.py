from collections.abc import Sequence

from torch import Tensor

from fusedseq.reference.dropout_mask import WEIGHT, ZONEOUT_C, ZONEOUT_H
from fusedseq.reference.steps import State, over_steps, zoneout
from fusedseq.reference.weight_drop import drop_weight


def lstm(
    x: Tensor,
    W_ih: Tensor,
    W_hh: Tensor,
    b: Tensor | None,
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
    """An LSTM over a sequence (Hochreiter & Schmidhuber, 1997), with torch.nn.LSTM's gate order
    i, f, g, o.

    x: (T, B, X)
    W_ih: (4H, X)
    W_hh: (4H, H)
    b: (4H,) or None
    h0, c0: (B, H)
    lengths: (B,) in [0, T], an int64 or int32 tensor on the device of x or on the CPU, or a list of
        ints; None for T. At steps past a sequence's length the state does not change and y is 0.
        What x and the gradient of y hold there is never used, even if it is NaN or infinite, and
        the gradient of x is 0 there.
    starts: (T, B) bool: where it is true, a new sequence starts, and the state before that step is
        zero in place of the one that was carried there; steps past a sequence's length ignore it
    reverse: whether each sequence is read from its own end to its start. y is in the order of x,
        and (h, c) is the state after step 0. `starts` are then the steps at which reading starts
        again: the last ones of the sequences in a packed row.
    zoneout_h, zoneout_c: probability in [0, 1] that a unit keeps its old h (c) at a step, by a mask
        for each step in the order in which they are computed; without `training` the new state is
        the expectation (Krueger et al., 2017)
    weight_drop: probability in [0, 1] that an element of W_hh is dropped while `training`, by one
        mask for all time steps (Merity et al., 2018, section 2); W_hh receives the gradient and is
        never written to
    variational: whether the mask has one value per row of W_hh
    training: whether weight_drop applies, and zoneout at random
    seed: as in `dropout_mask`. Calls with one seed, as with the default, draw one mask
    returns y: (T, B, H), (h, c): (B, H) each
    """
    if training and weight_drop:
        W_hh = drop_weight(WEIGHT, W_hh, weight_drop, seed, variational)
    mix_h = zoneout(ZONEOUT_H, zoneout_h, seed, training, h0.shape, x)
    mix_c = zoneout(ZONEOUT_C, zoneout_c, seed, training, c0.shape, x)

    def step(n: int, x_n: Tensor, state: State) -> State:
        h, c = state
        z = x_n @ W_ih.T + h @ W_hh.T
        i, f, g, o = (z if b is None else z + b).chunk(4, dim=-1)
        c_new = f.sigmoid() * c + i.sigmoid() * g.tanh()
        h_new = o.sigmoid() * c_new.tanh()
        return mix_h(n, h_new, h), mix_c(n, c_new, c)

    y, (h, c) = over_steps(step, x, (h0, c0), lengths, starts, reverse)
    return y, (h, c)
