from collections.abc import Sequence

from torch import Tensor

from fusedseq.reference.dropout_mask import WEIGHT, ZONEOUT_C
from fusedseq.reference.steps import State, over_steps, zoneout
from fusedseq.reference.weight_drop import drop_weight


def projected_lstm(
    x: Tensor,
    W_ih: Tensor,
    W_hh: Tensor,
    W_hr: Tensor,
    b: Tensor | None,
    h0: Tensor,
    c0: Tensor,
    lengths: Tensor | Sequence[int] | None = None,
    *,
    starts: Tensor | None = None,
    reverse: bool = False,
    zoneout_c: float = 0.0,
    weight_drop: float = 0.0,
    variational: bool = False,
    training: bool = True,
    seed: int | Tensor = 0,
) -> tuple[Tensor, tuple[Tensor, Tensor]]:
    """An LSTM whose output is projected to P numbers at every step, of which the next step reads
    nothing else (Sak et al., 2014): torch.nn.LSTM with proj_size=P.

        h' = W_hr (o tanh(c'))

    x: (T, B, X)
    W_ih: (4H, X) and W_hh: (4H, P), gates in the order i, f, g, o, as `lstm`
    W_hr: (P, H)
    b: (4H,) or None
    h0: (B, P)    c0: (B, H)
    lengths, starts, reverse, zoneout_c, weight_drop, variational, training, seed: as in `lstm`
    returns y: (T, B, P), h: (B, P), c: (B, H)
    """
    if training and weight_drop:
        W_hh = drop_weight(WEIGHT, W_hh, weight_drop, seed, variational)
    mix_c = zoneout(ZONEOUT_C, zoneout_c, seed, training, c0.shape, x)

    def step(n: int, x_n: Tensor, state: State) -> State:
        h, c = state
        z = x_n @ W_ih.T + h @ W_hh.T
        i, f, g, o = (z if b is None else z + b).chunk(4, dim=-1)
        c_new = f.sigmoid() * c + i.sigmoid() * g.tanh()
        return (o.sigmoid() * c_new.tanh()) @ W_hr.T, mix_c(n, c_new, c)

    y, (h, c) = over_steps(step, x, (h0, c0), lengths, starts, reverse)
    return y, (h, c)
