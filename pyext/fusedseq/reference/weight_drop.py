from fusedseq.reference.dropout_mask import drop, dropout_mask


def weight_drop(W, p, seed, variational=False):
    """DropConnect on a weight matrix (Wan et al., 2013), the weight drop of AWD-LSTM (Merity et al., 2018).

    W: (rows, columns)    p: in [0, 1]    seed: as in `dropout_mask`
    variational: one mask value per row instead of one per element
    returns (rows, columns); W itself is never written
    """
    if p == 0:
        return W.clone()
    if variational:
        return drop(W, dropout_mask(seed, p, W.shape[:1], W.device)[:, None], p)
    return drop(W, dropout_mask(seed, p, W.shape, W.device), p)
