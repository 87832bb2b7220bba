import torch
from torch.nn import functional as F

from fusedseq.reference.dropout import dropout

ACTIVATIONS = {
    "relu": torch.relu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "tanh": torch.tanh,
}


def bias_activation_dropout(x, b=None, activation="relu", p=0.0, seed=0):
    """What stands between the two products of a feed-forward layer (Vaswani et al., 2017): dropout(activation(x + b)).

    x: (..., D), the first product without its bias    b: (D,) or None    p, seed: as in `dropout`
    activation: relu, gelu (Hendrycks & Gimpel, 2016), gelu_tanh (its approximation by tanh) or tanh
    returns (..., D)
    """
    return dropout(ACTIVATIONS[activation](x if b is None else x + b), p, seed)
