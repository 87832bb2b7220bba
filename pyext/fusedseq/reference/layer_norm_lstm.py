from collections.abc import Sequence

from torch import Tensor
from torch.nn.functional import layer_norm

from fusedseq.reference.dropout_mask import WEIGHT, ZONEOUT_C, ZONEOUT_H
from fusedseq.reference.steps import State, over_steps, zoneout
from fusedseq.reference.weight_drop import drop_weight


def layer_norm_lstm(
    x: Tensor,
    W_ih: Tensor,
    W_hh: Tensor,
    b: Tensor | None,
    gamma_ih: Tensor,
    gamma_hh: Tensor,
    gamma_c: Tensor,
    beta_c: Tensor,
    h0: Tensor,
    c0: Tensor,
    lengths: Tensor | Sequence[int] | None = None,
    *,
    eps: float = 1e-5,
    starts: Tensor | None = None,
    reverse: bool = False,
    zoneout_h: float = 0.0,
    zoneout_c: float = 0.0,
    weight_drop: float = 0.0,
    variational: bool = False,
    training: bool = True,
    seed: int | Tensor = 0,
) -> tuple[Tensor, tuple[Tensor, Tensor]]:
    """An LSTM with layer normalization (Ba et al., 2016, equations 20 to 22) of both products and
    of the cell state, as the library haste has it.

        i, f, g, o = gamma_ih norm(W_ih x) + gamma_hh norm(W_hh h) + b
        c' = sigmoid(f) c + sigmoid(i) tanh(g)
        h' = sigmoid(o) tanh(gamma_c norm(c') + beta_c)

    norm(v) = (v - mean(v)) / sqrt(var(v) + eps), over all 4H pre-activations of a product together,
    and over the H units of c'. b stands for the sum of the shifts of both products.

    x: (T, B, X)
    W_ih: (4H, X) and W_hh: (4H, H), gates in the order i, f, g, o, as `lstm`
    b: (4H,) or None
    gamma_ih, gamma_hh: (4H,)    gamma_c, beta_c: (H,)
    h0, c0: (B, H)
    eps: at least 0, added to the variances
    lengths, starts, reverse, zoneout_h, zoneout_c, weight_drop, variational, training, seed: as in
        `lstm`
    returns y: (T, B, H), (h, c): (B, H) each; c is not normalized
    """
    if training and weight_drop:
        W_hh = drop_weight(WEIGHT, W_hh, weight_drop, seed, variational)
    mix_h = zoneout(ZONEOUT_H, zoneout_h, seed, training, h0.shape, x)
    mix_c = zoneout(ZONEOUT_C, zoneout_c, seed, training, c0.shape, x)

    def step(n: int, x_n: Tensor, state: State) -> State:
        h, c = state
        z = layer_norm(x_n @ W_ih.T, gamma_ih.shape, gamma_ih, b, eps)
        z = z + layer_norm(h @ W_hh.T, gamma_hh.shape, gamma_hh, None, eps)
        i, f, g, o = z.chunk(4, dim=-1)
        c_new = f.sigmoid() * c + i.sigmoid() * g.tanh()
        h_new = o.sigmoid() * layer_norm(c_new, gamma_c.shape, gamma_c, beta_c, eps).tanh()
        return mix_h(n, h_new, h), mix_c(n, c_new, c)

    y, (h, c) = over_steps(step, x, (h0, c0), lengths, starts, reverse)
    return y, (h, c)
