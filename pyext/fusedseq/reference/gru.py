from collections.abc import Sequence

from torch import Tensor, nn

from fusedseq.reference.dropout_mask import WEIGHT, ZONEOUT_H
from fusedseq.reference.steps import State, over_steps, zoneout
from fusedseq.reference.weight_drop import drop_weight


def gru(
    x: Tensor,
    W_ih: Tensor,
    W_hh: Tensor,
    b: Tensor | None,
    h0: Tensor,
    lengths: Tensor | Sequence[int] | None = None,
    *,
    starts: Tensor | None = None,
    reverse: bool = False,
    zoneout_h: float = 0.0,
    weight_drop: float = 0.0,
    variational: bool = False,
    training: bool = True,
    seed: int | Tensor = 0,
) -> tuple[Tensor, Tensor]:
    """A gated recurrent unit over a sequence (Cho et al., 2014), in the form of torch.nn.GRU, whose
    reset gate multiplies the product with W_hh and not its operand.

        r = sigmoid(W_ir x + W_hr h + b_r)
        z = sigmoid(W_iz x + W_hz h + b_z)
        n = tanh(W_in x + b_in + r (W_hn h + b_hn))
        h = (1 - z) n + z h

    x: (T, B, X)
    W_ih: (3H, X) and W_hh: (3H, H), gates in the order r, z, n, as torch.nn.GRU
    b: (4H,) or None: b_r, b_z, b_in, b_hn. From the biases of torch.nn.GRU these are the sums of
        the first two thirds, then the last third of each.
    h0: (B, H)
    lengths, starts, reverse, zoneout_h, weight_drop, variational, training, seed: as in
        `lstm`
    returns y: (T, B, H), h: (B, H)
    """
    if training and weight_drop:
        W_hh = drop_weight(WEIGHT, W_hh, weight_drop, seed, variational)
    mix_h = zoneout(ZONEOUT_H, zoneout_h, seed, training, h0.shape, x)
    H = h0.size(1)

    def step(n: int, x_n: Tensor, state: State) -> State:
        (h,) = state
        from_x, from_h = x_n @ W_ih.T, h @ W_hh.T
        if b is not None:
            from_x, from_h = from_x + b[: 3 * H], from_h + nn.functional.pad(b[3 * H :], (2 * H, 0))
        r, z = (from_x + from_h)[:, : 2 * H].sigmoid().chunk(2, dim=-1)
        new = (from_x[:, 2 * H :] + r * from_h[:, 2 * H :]).tanh()
        return (mix_h(n, new + z * (h - new), h),)

    y, (h,) = over_steps(step, x, (h0,), lengths, starts, reverse)
    return y, h
