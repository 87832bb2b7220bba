from torch import Tensor

from fusedseq.reference.dropout_mask import drop, dropout_mask


def locked_dropout(x: Tensor, p: float, seed: int | Tensor) -> Tensor:
    """Locked dropout, also called variational dropout (Gal & Ghahramani, 2016; Merity et al., 2018,
    section 4.2): one mask for all time steps.

    x: (T, B, D)
    p: in [0, 1]
    seed: as in `dropout_mask`, whose (B, D) mask is applied to every time step
    returns (T, B, D)
    """
    if p == 0:
        return x.clone()
    return drop(x, dropout_mask(seed, p, x.shape[1:], x.device), p)
