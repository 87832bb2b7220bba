from torch.nn import functional as F

from fusedseq.reference.dropout_mask import drop, dropout_mask


def embedding(ids, W, p=0.0, seed=0, sparse=False):
    """Rows of W, with embedding dropout (Gal & Ghahramani, 2016; Merity et al., 2018): whole words are dropped.

    ids: int64, any shape, in [0, V)    W: (V, E)    p: in [0, 1]    seed: as in `dropout_mask`
    sparse: give W's gradient as a sparse tensor of the rows used, as torch.nn.Embedding(sparse=True) does
    returns (*ids.shape, E)

    The mask has one value per word type, shape (V,): a dropped word is dropped wherever it stands.
    """
    rows = F.embedding(ids, W, sparse=sparse)
    if p == 0:
        return rows
    keep = dropout_mask(seed, p, W.shape[:1], W.device)
    return drop(rows, keep[ids][..., None], p)
