from collections.abc import Sequence

from torch import Tensor

from fusedseq.reference.dropout_mask import WEIGHT, ZONEOUT_H
from fusedseq.reference.steps import State, over_steps, zoneout
from fusedseq.reference.weight_drop import drop_weight


def rnn(
    x: Tensor,
    W_ih: Tensor,
    W_hh: Tensor,
    b: Tensor | None,
    h0: Tensor,
    lengths: Tensor | Sequence[int] | None = None,
    *,
    relu: bool = False,
    starts: Tensor | None = None,
    reverse: bool = False,
    zoneout_h: float = 0.0,
    weight_drop: float = 0.0,
    variational: bool = False,
    training: bool = True,
    seed: int | Tensor = 0,
) -> tuple[Tensor, Tensor]:
    """A simple recurrent network over a sequence (Elman, 1990): h = tanh(W_ih x + W_hh h + b).

    x: (T, B, X)
    W_ih: (H, X)
    W_hh: (H, H)
    b: (H,) or None
    h0: (B, H)
    relu: whether h is max(z, 0) of the pre-activation z, and not tanh(z)
    lengths, starts, reverse, zoneout_h, weight_drop, variational, training, seed: as in
        `lstm`
    returns y: (T, B, H), h: (B, H)
    """
    if training and weight_drop:
        W_hh = drop_weight(WEIGHT, W_hh, weight_drop, seed, variational)
    mix_h = zoneout(ZONEOUT_H, zoneout_h, seed, training, h0.shape, x)

    def step(n: int, x_n: Tensor, state: State) -> State:
        (h,) = state
        z = x_n @ W_ih.T + h @ W_hh.T
        z = z if b is None else z + b
        return (mix_h(n, z.relu() if relu else z.tanh(), h),)

    y, (h,) = over_steps(step, x, (h0,), lengths, starts, reverse)
    return y, h
