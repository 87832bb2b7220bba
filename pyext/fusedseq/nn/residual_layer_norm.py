import torch
from torch import nn

from fusedseq import fused
from fusedseq.nn.dropout import check_probability, draw_seed


class ResidualLayerNorm(nn.Module):
    """LayerNorm(residual + dropout(x)), around every sublayer of a Transformer (Vaswani et al., 2017), in one pass.

    normalized_shape: D    dropout: of x, in training    eps: added to the variance    bias: as in torch.nn.LayerNorm,
    whose state dict it loads; elementwise_affine=False: neither weight nor bias
    prenorm: forward gives (y, s) too, s = residual + dropout(x) for the next residual (Wang et al., 2019)
    forward: x (..., D), residual (..., D) or None -> y (..., D)
    """

    def __init__(
        self, normalized_shape, dropout=0.0, *, eps=1e-5, elementwise_affine=True, bias=True, prenorm=False,
        device=None, dtype=None, ops=fused,
    ):  # fmt: skip
        super().__init__()
        self.normalized_shape, self.eps, self.prenorm = normalized_shape, eps, prenorm
        self.dropout = check_probability(dropout, "ResidualLayerNorm", "dropout")
        for name, wanted in (("weight", elementwise_affine), ("bias", elementwise_affine and bias)):
            parameter = nn.Parameter(torch.empty(normalized_shape, device=device, dtype=dtype)) if wanted else None
            self.register_parameter(name, parameter)
        self._norm = ops.residual_layer_norm
        self.reset_parameters()

    def reset_parameters(self):
        if self.weight is not None:
            nn.init.ones_(self.weight)
        if self.bias is not None:
            nn.init.zeros_(self.bias)

    def forward(self, x, residual=None):
        dropping = {"p": self.dropout, "seed": draw_seed(x.device)} if self.training and self.dropout else {}
        return self._norm(x, residual, self.weight, self.bias, eps=self.eps, prenorm=self.prenorm, **dropping)

    def extra_repr(self):
        return f"{self.normalized_shape}, dropout={self.dropout}, eps={self.eps}, prenorm={self.prenorm}"
