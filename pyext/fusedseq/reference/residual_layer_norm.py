from torch import Tensor
from torch.nn import functional as F

from fusedseq.reference.dropout import dropout


def residual_layer_norm(
    x: Tensor,
    residual: Tensor | None = None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    *,
    p: float = 0.0,
    eps: float = 1e-5,
    prenorm: bool = False,
    seed: int | Tensor = 0,
) -> Tensor | tuple[Tensor, Tensor]:
    """Dropout, residual connection and LayerNorm (Ba et al., 2016, equation 4), as around each
    sublayer of a Transformer (Vaswani et al., 2017, section 5.4):

        s = residual + dropout(x)        y = (s - mean(s)) / sqrt(var(s) + eps) * weight + bias

    x: (..., D)
    residual: (..., D), or None for 0
    weight, bias: (D,), or None for 1 and 0
    p, seed: the dropout of x, as in `dropout`. Calls with one seed, as with the default, draw one
        mask
    eps: added to the biased variance
    prenorm: whether to return s too, as the residual of the next sublayer (Wang et al., 2019)
    returns y: (..., D), or with prenorm (y, s)
    """
    s = dropout(x, p, seed)
    if residual is not None:
        s = residual + s
    # F.layer_norm with its own weight but no bias, or the reverse, has no double backward.
    y = F.layer_norm(s, s.shape[-1:], eps=eps)
    if weight is not None:
        y = y * weight
    if bias is not None:
        y = y + bias
    return (y, s) if prenorm else y
