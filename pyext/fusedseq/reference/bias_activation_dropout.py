import torch
from torch import Tensor
from torch.nn import functional as F

from fusedseq.reference.dropout import dropout

ACTIVATIONS = {
    "relu": torch.relu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "tanh": torch.tanh,
}


def bias_activation_dropout(
    x: Tensor,
    b: Tensor | None = None,
    activation: str = "relu",
    p: float = 0.0,
    seed: int | Tensor = 0,
) -> Tensor:
    """The part of a feed-forward layer between its two matrix products (Vaswani et al., 2017,
    section 3.3): dropout(activation(x + b)).

    x: (..., D), the first product without its bias
    b: (D,) or None
    activation: "relu", "gelu" (Hendrycks & Gimpel, 2016), "gelu_tanh" (its tanh approximation) or
        "tanh"
    p, seed: as in `dropout`. Calls with one seed, as with the default, draw one mask
    returns (..., D)
    """
    return dropout(ACTIVATIONS[activation](x if b is None else x + b), p, seed)
