from torch.nn import functional as F

from fusedseq.reference.dropout import dropout


def residual_layer_norm(x, residual=None, weight=None, bias=None, *, p=0.0, eps=1e-5, prenorm=False, seed=0):
    """Dropout, residual connection and LayerNorm (Ba et al., 2016), as around every sublayer of a Transformer
    (Vaswani et al., 2017):

        s = residual + dropout(x)        y = (s - mean(s)) / sqrt(var(s) + eps) * weight + bias

    x: (..., D)    residual: (..., D), or None for 0    weight, bias: (D,), or None for 1 and 0
    p, seed: of the dropout of x, as in `dropout`    eps: added to the biased variance
    prenorm: give s too, for the residual of the next sublayer (Wang et al., 2019)
    returns y: (..., D); with prenorm (y, s)
    """
    s = dropout(x, p, seed)
    if residual is not None:
        s = residual + s
    y = F.layer_norm(s, s.shape[-1:], eps=eps)  # its own weight and bias have, without the other, no double backward
    if weight is not None:
        y = y * weight
    if bias is not None:
        y = y + bias
    return (y, s) if prenorm else y
