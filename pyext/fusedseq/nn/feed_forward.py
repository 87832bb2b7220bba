"""The feed-forward layer of a Transformer, over `linear` and `bias_activation_dropout`."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fusedseq import fused
from fusedseq.nn.dropout import check_probability, draw_seed
from fusedseq.nn.initialization import reset_in_order
from fusedseq.nn.operators import Operators, shown_options
from fusedseq.nn.sublayers import is_linear

ACTIVATIONS = ("relu", "gelu", "gelu_tanh", "tanh")
NAMES = {F.relu: "relu", torch.relu: "relu", F.gelu: "gelu", F.tanh: "tanh", torch.tanh: "tanh"}
Activation = str | Callable[[Tensor], Tensor]


def known_activation(activation: Any) -> str | None:
    """Returns the operator's name of an activation, or None if it has none.

    activation: one of ACTIVATIONS, or the function or module of torch that computes it
    """
    if isinstance(activation, str):
        return activation if activation in ACTIVATIONS else None
    if isinstance(activation, nn.Module) and "forward" in vars(activation):
        return None
    if type(activation) is nn.GELU:
        return {"none": "gelu", "tanh": "gelu_tanh"}.get(activation.approximate)
    if type(activation) in (nn.ReLU, nn.Tanh):
        return type(activation).__name__.lower()
    return NAMES.get(activation)


def activation_name(activation: Any, module: str) -> str:
    """Returns the operator's name of an activation, as `known_activation`.

    Errors: ValueError, naming the module, for one that has none.
    """
    name = known_activation(activation)
    if name is None:
        raise ValueError(
            f"{module}: activation must be {', '.join(ACTIVATIONS)}, or the function or module of "
            f"torch that computes one of them, got {activation!r}"
        )
    return name


class FeedForward(nn.Module):
    """The position-wise feed-forward layer of a Transformer (Vaswani et al., 2017).

        linear2(dropout(activation(linear1(x))))

    Both matrix products are the operator `linear`. The bias of `linear1`, the activation and the
    dropout are applied in one pass between them. A `linear1` or `linear2` that is replaced by a
    module with a forward of its own, or has hooks, is called.

    d_model: D    dim_feedforward: width of the inner layer
    dropout: probability that an inner activation is dropped in training mode
    activation: relu, gelu, gelu_tanh or tanh, or the function or module of torch that computes it
    bias: whether both linear layers have a bias
    device, dtype: of the parameters, as in torch    ops: `fusedseq.fused` or `fusedseq.reference`
    `linear1` and `linear2` are named as in torch.nn.TransformerEncoderLayer.
    forward: (..., D) -> (..., D)
    Errors: ValueError for a d_model below 1, a dim_feedforward below 0, a dropout outside [0, 1] or
    another activation.
    """

    def __init__(
        self,
        d_model: int,
        dim_feedforward: int = 2048,
        dropout: float = 0.1,
        activation: Activation = "relu",
        *,
        bias: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        ops: Operators = fused,
    ) -> None:
        super().__init__()
        check_sizes("FeedForward", d_model, dim_feedforward)
        self.d_model, self.dim_feedforward = d_model, dim_feedforward
        self.activation = activation_name(activation, "FeedForward")
        self.dropout = check_probability(dropout, "FeedForward", "dropout")
        self.linear1 = nn.Linear(d_model, dim_feedforward, bias=bias, device=device, dtype=dtype)
        self.linear2 = nn.Linear(dim_feedforward, d_model, bias=bias, device=device, dtype=dtype)
        self._linear, self._bias_activation_dropout = ops.linear, ops.bias_activation_dropout

    def reset_parameters(self) -> None:
        """Draws both layers as torch.nn.Linear."""
        reset_in_order((self.linear1, self.linear2))

    def forward(self, x: Tensor) -> Tensor:
        """Applies the layer to x (..., D); returns (..., D)."""
        return feed_forward(self, x, self.dropout)

    def extra_repr(self) -> str:
        return shown_options(self, bias=self.linear1.bias is not None)


def check_sizes(module: str, d_model: Any, dim_feedforward: Any) -> None:
    """Raises ValueError unless d_model is an int of at least 1 and dim_feedforward of at least 0.

    torch.nn.TransformerEncoderLayer, too, takes a width of 0, with which the layer returns the bias
    of `linear2`.
    """
    are_whole = all(
        isinstance(n, int) and not isinstance(n, bool) for n in (d_model, dim_feedforward)
    )
    if not are_whole or d_model < 1 or dim_feedforward < 0:
        raise ValueError(
            f"{module}: d_model must be an int of at least 1 and dim_feedforward one of at least "
            f"0, got {d_model!r} and {dim_feedforward!r}"
        )


def feed_forward(module: Any, x: Tensor, dropout: float) -> Tensor:
    """Computes linear2(dropout(activation(linear1(x)))) with the layers and operators of a module.

    x: (..., D)    dropout: of the inner activations, in training mode
    returns (..., D)
    """
    first, second = module.linear1, module.linear2
    dropping = (dropout, draw_seed(x.device)) if module.training and dropout else ()
    if is_linear(first):
        hidden, bias = module._linear(x, first.weight), first.bias
    else:
        hidden, bias = first(x), None
    hidden = module._bias_activation_dropout(hidden, bias, module.activation, *dropping)
    y: Tensor
    y = module._linear(hidden, second.weight, second.bias) if is_linear(second) else second(hidden)
    return y
