from torch import Tensor

from fusedseq.reference.dropout_mask import SINGLE, drop, stream_mask


def weight_drop(W: Tensor, p: float, seed: int | Tensor, variational: bool = False) -> Tensor:
    """DropConnect on a weight matrix (Wan et al., 2013), as AWD-LSTM's weight drop (Merity et al.,
    2018, section 2).

    W: (rows, columns)
    p: in [0, 1]
    seed: as in `dropout_mask`
    variational: whether the mask has one value per row, not one per element
    returns (rows, columns); W itself is never written to
    """
    return drop_weight(SINGLE, W, p, seed, variational)


def drop_weight(
    stream: int, W: Tensor, p: float, seed: int | Tensor, variational: bool = False
) -> Tensor:
    """`weight_drop` by the mask of another stream, for an operator that has several masks."""
    if p == 0:
        return W.clone()
    if variational:
        return drop(W, stream_mask(stream, seed, p, W.shape[:1], W.device)[:, None], p)
    return drop(W, stream_mask(stream, seed, p, W.shape, W.device), p)
