from torch import Tensor

from fusedseq.reference.dropout_mask import drop, dropout_mask


def dropout(x: Tensor, p: float, seed: int | Tensor) -> Tensor:
    """Dropout (Srivastava et al., 2014): each element is dropped with probability `p`, and the
    others are multiplied by 1 / (1 - p).

    x: any shape
    p: in [0, 1]
    seed: as in `dropout_mask`, whose mask of x's shape is applied
    returns the shape and dtype of x
    """
    if p == 0:
        return x.clone()
    return drop(x, dropout_mask(seed, p, x.shape, x.device), p)
