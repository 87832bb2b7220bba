import torch

from fusedseq.reference.mogrifier_lstm import WEIGHT
from fusedseq.reference.weight_drop import weight_drop as drop_weight


def lstm(x, W_ih, W_hh, b, h0, c0, lengths=None, *, weight_drop=0.0, variational=False, training=True, seed=0):
    """An LSTM over a sequence (Hochreiter & Schmidhuber, 1997); torch.nn.LSTM's gate order i, f, g, o.

    x: (T, B, X)    W_ih: (4H, X)    W_hh: (4H, H)    b: (4H,) or None    h0, c0: (B, H)
    lengths: (B,) int64, in [0, T], or None for T: steps past a sequence's length leave its state and give zeros
    weight_drop: on W_hh where `training`, one mask for all steps; `variational`: one mask value per row (Merity et al.,
        2018); W_hh itself is never written, and receives the gradient
    seed: as in `dropout_mask`
    returns y: (T, B, H), (h, c): (B, H) each
    """
    if training and weight_drop:
        W_hh = drop_weight(W_hh, weight_drop, seed + WEIGHT, variational)
    h, c, y = h0, c0, []
    for t, x_t in enumerate(x):
        z = x_t @ W_ih.T + h @ W_hh.T
        i, f, g, o = (z if b is None else z + b).chunk(4, dim=-1)
        c_new = f.sigmoid() * c + i.sigmoid() * g.tanh()
        h_new = o.sigmoid() * c_new.tanh()
        if lengths is not None:
            alive = (t < lengths)[:, None]
            y.append(torch.where(alive, h_new, 0.0))
            h, c = torch.where(alive, h_new, h), torch.where(alive, c_new, c)
        else:
            y.append(h_new)
            h, c = h_new, c_new
    return torch.stack(y), (h, c)
