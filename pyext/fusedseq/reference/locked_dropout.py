from fusedseq.reference.dropout_mask import drop, dropout_mask


def locked_dropout(x, p, seed):
    """LockedDropout, or variational dropout (Gal & Ghahramani, 2016; Merity et al., 2018): one mask for all steps.

    x: (T, B, D)    p: in [0, 1]    seed: as in `dropout_mask`, whose (B, D) mask serves every step
    returns (T, B, D)
    """
    if p == 0:
        return x.clone()
    return drop(x, dropout_mask(seed, p, x.shape[1:], x.device), p)
