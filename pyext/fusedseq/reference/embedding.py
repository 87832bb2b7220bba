from torch import Tensor
from torch.nn import functional as F

from fusedseq.reference.dropout_mask import drop, dropout_mask


def embedding(
    ids: Tensor, W: Tensor, p: float = 0.0, seed: int | Tensor = 0, sparse: bool = False
) -> Tensor:
    """Rows of an embedding matrix with embedding dropout (Gal & Ghahramani, 2016; Merity et al.,
    2018, section 4.3), which drops whole words.

    ids: int64 or int32 of any shape, in [0, V)
    W: (V, E)
    p: probability in [0, 1] that a word is dropped
    seed: as in `dropout_mask`. Calls with one seed, as with the default, draw one mask
    sparse: whether W's gradient is a sparse tensor of the rows used, as in
        torch.nn.Embedding(sparse=True)
    returns (*ids.shape, E)

    The mask has shape (V,), one value per word: a dropped word is dropped at every position.
    """
    rows = F.embedding(ids, W, sparse=sparse)
    if p == 0:
        return rows
    keep = dropout_mask(seed, p, W.shape[:1], W.device)
    return drop(rows, keep[ids][..., None], p)
