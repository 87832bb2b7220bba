from torch import nn

from fusedseq import fused
from fusedseq.nn.dropout import check_probability, draw_seed


class FeedForward(nn.Module):
    """The position-wise feed-forward layer of a Transformer (Vaswani et al., 2017):

        linear2(dropout(activation(linear1(x))))

    The products are the operator `linear`; the bias of the first, the activation and the dropout are one pass between them.
    d_model: D    dim_feedforward: inner width    activation: relu, gelu, gelu_tanh or tanh    dropout: in training
    `linear1` and `linear2` are named as in torch.nn.TransformerEncoderLayer.
    forward: (..., D) -> (..., D)
    """

    def __init__(
        self, d_model, dim_feedforward=2048, dropout=0.1, activation="relu", *, bias=True, device=None, dtype=None, ops=fused
    ):  # fmt: skip
        super().__init__()
        self.activation, self.dropout = activation, check_probability(dropout, "FeedForward", "dropout")
        self.linear1 = nn.Linear(d_model, dim_feedforward, bias=bias, device=device, dtype=dtype)
        self.linear2 = nn.Linear(dim_feedforward, d_model, bias=bias, device=device, dtype=dtype)
        self._linear, self._activate = ops.linear, ops.bias_activation_dropout

    def forward(self, x):
        dropping = (self.dropout, draw_seed(x.device)) if self.training and self.dropout else ()
        hidden = self._linear(x, self.linear1.weight)
        hidden = self._activate(hidden, self.linear1.bias, self.activation, *dropping)
        return self._linear(hidden, self.linear2.weight, self.linear2.bias)

    def extra_repr(self):
        return f"activation={self.activation}, dropout={self.dropout}"
