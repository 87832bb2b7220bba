from collections.abc import Sequence

from torch import Tensor, nn
from torch.nn.functional import layer_norm

from fusedseq.reference.dropout_mask import WEIGHT, ZONEOUT_H
from fusedseq.reference.steps import State, over_steps, zoneout
from fusedseq.reference.weight_drop import drop_weight


def layer_norm_gru(
    x: Tensor,
    W_ih: Tensor,
    W_hh: Tensor,
    b: Tensor | None,
    gamma_ih: Tensor,
    gamma_hh: Tensor,
    h0: Tensor,
    lengths: Tensor | Sequence[int] | None = None,
    *,
    eps: float = 1e-5,
    starts: Tensor | None = None,
    reverse: bool = False,
    zoneout_h: float = 0.0,
    weight_drop: float = 0.0,
    variational: bool = False,
    training: bool = True,
    seed: int | Tensor = 0,
) -> tuple[Tensor, Tensor]:
    """A gated recurrent unit with layer normalization (Ba et al., 2016) of both products, as the
    library haste has it.

        u = gamma_ih norm(W_ih x)      v = gamma_hh norm(W_hh h)
        r = sigmoid(u_r + v_r + b_r)
        z = sigmoid(u_z + v_z + b_z)
        n = tanh(u_n + b_in + r (v_n + b_hn))
        h = (1 - z) n + z h

    norm(v) = (v - mean(v)) / sqrt(var(v) + eps), over all 3H pre-activations of a product together.

    x: (T, B, X)
    W_ih: (3H, X) and W_hh: (3H, H), gates in the order r, z, n, as `gru`
    b: (4H,) or None: b_r, b_z, b_in, b_hn, as `gru`
    gamma_ih, gamma_hh: (3H,)
    h0: (B, H)
    eps: at least 0, added to the variances
    lengths, starts, reverse, zoneout_h, weight_drop, variational, training, seed: as in `lstm`
    returns y: (T, B, H), h: (B, H)
    """
    if training and weight_drop:
        W_hh = drop_weight(WEIGHT, W_hh, weight_drop, seed, variational)
    mix_h = zoneout(ZONEOUT_H, zoneout_h, seed, training, h0.shape, x)
    H = h0.size(1)

    def step(n: int, x_n: Tensor, state: State) -> State:
        (h,) = state
        from_x = layer_norm(x_n @ W_ih.T, gamma_ih.shape, gamma_ih, None, eps)
        from_h = layer_norm(h @ W_hh.T, gamma_hh.shape, gamma_hh, None, eps)
        if b is not None:
            from_x, from_h = from_x + b[: 3 * H], from_h + nn.functional.pad(b[3 * H :], (2 * H, 0))
        r, z = (from_x + from_h)[:, : 2 * H].sigmoid().chunk(2, dim=-1)
        new = (from_x[:, 2 * H :] + r * from_h[:, 2 * H :]).tanh()
        return (mix_h(n, new + z * (h - new), h),)

    y, (h,) = over_steps(step, x, (h0,), lengths, starts, reverse)
    return y, h
