"""Single Transformer layers with the names, arguments and state dicts of torch's layers."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from fusedseq import fused
from fusedseq.nn.dropout import Dropout, check_probability
from fusedseq.nn.feed_forward import Activation, activation_name, check_sizes, feed_forward
from fusedseq.nn.initialization import reset_in_order
from fusedseq.nn.multihead_attention import MultiheadAttention
from fusedseq.nn.operators import Operators, shown_options
from fusedseq.nn.residual_layer_norm import ResidualLayerNorm


class _TransformerLayer(nn.Module):
    """The base class: sublayers in torch's order, each with a residual connection and a norm.

    In pre-norm (Wang et al., 2019) a sublayer's result is added to the residual in the norm of the
    next sublayer, in one pass; the result of the last sublayer is added by itself.
    """

    attentions: tuple[str, ...]  # the attributes of the attention sublayers

    def __init__(
        self,
        d_model: int,
        nhead: int,
        dim_feedforward: int = 2048,
        dropout: float = 0.1,
        activation: Activation = "relu",
        layer_norm_eps: float = 1e-5,
        batch_first: bool = False,
        norm_first: bool = False,
        bias: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        ops: Operators = fused,
    ) -> None:
        super().__init__()
        name = type(self).__name__
        check_sizes(name, d_model, dim_feedforward)
        check_probability(dropout, name, "dropout")
        place: dict[str, Any] = {"device": device, "dtype": dtype}
        for attention in self.attentions:
            module = MultiheadAttention(
                d_model, nhead, dropout, bias, batch_first=batch_first, ops=ops, **place
            )
            self.add_module(attention, module)
        self.linear1 = nn.Linear(d_model, dim_feedforward, bias=bias, **place)
        self.linear2 = nn.Linear(dim_feedforward, d_model, bias=bias, **place)
        for i in range(len(self.attentions) + 1):
            # Without a residual, the first norm of a pre-norm layer has nothing to drop.
            norm = ResidualLayerNorm(
                d_model,
                0.0 if norm_first and i == 0 else dropout,
                eps=layer_norm_eps,
                bias=bias,
                prenorm=norm_first and i > 0,
                ops=ops,
                **place,
            )
            self.add_module(f"norm{i + 1}", norm)
        self.activation = activation_name(activation, name)
        self.dropout, self.norm_first = dropout, norm_first
        self.last_dropout = Dropout(dropout if norm_first else 0.0, ops=ops)
        self._linear, self._bias_activation_dropout = ops.linear, ops.bias_activation_dropout

    def reset_parameters(self) -> None:
        """Draws the attentions as `MultiheadAttention`, and linear1 and linear2 as torch.nn.Linear;
        the norms' weights become 1 and their biases 0.
        """
        reset_in_order(self.children())

    def _run(self, x: Tensor, attend: tuple[Callable[[Tensor], Tensor], ...]) -> Tensor:
        """Applies the attention sublayers and the feed-forward sublayer to x."""
        sublayers: list[Callable[[Tensor], Tensor]] = [*attend, self._feed_forward]
        norms: list[Any] = [getattr(self, f"norm{i + 1}") for i in range(len(sublayers))]
        if not self.norm_first:
            for norm, sublayer in zip(norms, sublayers, strict=True):
                x = norm(sublayer(x), x)
            return x
        y = sublayers[0](norms[0](x))
        for norm, sublayer in zip(norms[1:], sublayers[1:], strict=True):
            y, x = norm(y, x)
            y = sublayer(y)
        dropped: Tensor = self.last_dropout(y)
        return x + dropped

    def _feed_forward(self, x: Tensor) -> Tensor:
        return feed_forward(self, x, self.dropout)

    def extra_repr(self) -> str:
        attention, norm = getattr(self, self.attentions[0]), self.get_submodule("norm1")
        return shown_options(
            self,
            d_model=attention.embed_dim,
            nhead=attention.num_heads,
            dim_feedforward=self.linear1.out_features,
            layer_norm_eps=norm.eps,
            batch_first=attention.batch_first,
            bias=self.linear1.bias is not None,
        )


class TransformerEncoderLayer(_TransformerLayer):
    """Self-attention, then a feed-forward (Vaswani et al., 2017), as torch's module of this name.

    The state dicts of the two are interchangeable, and torch.nn.TransformerEncoder takes this
    layer. With the same parameters both compute the same; random masks differ.

    d_model: E    nhead: number of attention heads, a divisor of E
    dim_feedforward: width of the inner layer
    dropout: of attention probabilities, of inner activations and of what each sublayer adds
    activation: relu, gelu, gelu_tanh or tanh, or the function or module of torch that computes it
    layer_norm_eps: added to the variance in the norms
    batch_first: whether inputs are (B, L, E), not (L, B, E)
    norm_first: whether norms come before the sublayers (pre-norm), not after them
    bias: whether attention, feed-forward and norms have biases
    device, dtype: of the parameters, as in torch    ops: `fusedseq.fused` or `fusedseq.reference`
    Errors: ValueError where nhead does not divide d_model, for a negative size, a dropout outside
    [0, 1] and any other activation.
    """

    attentions = ("self_attn",)
    self_attn: MultiheadAttention

    def forward(
        self,
        src: Tensor,
        src_mask: Tensor | None = None,
        src_key_padding_mask: Tensor | None = None,
        is_causal: bool = False,
    ) -> Tensor:
        """Applies the layer; returns a tensor of src's shape.

        src: (L, B, E), (B, L, E) with `batch_first`, or (L, E)
        src_mask, src_key_padding_mask, is_causal: attn_mask, key_padding_mask and is_causal of
            `MultiheadAttention.forward`. With is_causal no mask is required
        """

        def attend(x: Tensor) -> Tensor:
            y: Tensor = self.self_attn(
                x, x, x, src_key_padding_mask, False, src_mask, is_causal=is_causal
            )[0]
            return y

        return self._run(src, (attend,))


class TransformerDecoderLayer(_TransformerLayer):
    """Self-attention, attention to an encoder's output, then a feed-forward, as torch's module.

    Arguments and errors as of `TransformerEncoderLayer`. The state dicts of torch's layer and of
    this one are interchangeable, and torch.nn.TransformerDecoder takes this layer. As in torch,
    self-attention is causal only with `tgt_is_causal` or a mask.
    """

    attentions = "self_attn", "multihead_attn"
    self_attn: MultiheadAttention
    multihead_attn: MultiheadAttention

    def forward(
        self,
        tgt: Tensor,
        memory: Tensor,
        tgt_mask: Tensor | None = None,
        memory_mask: Tensor | None = None,
        tgt_key_padding_mask: Tensor | None = None,
        memory_key_padding_mask: Tensor | None = None,
        tgt_is_causal: bool = False,
        memory_is_causal: bool = False,
    ) -> Tensor:
        """Applies the layer; returns a tensor of tgt's shape.

        tgt: (L, B, E), (B, L, E) with `batch_first`, or (L, E)    memory: the encoder's output
        tgt_mask, tgt_key_padding_mask, tgt_is_causal: attn_mask, key_padding_mask and is_causal of
            `MultiheadAttention.forward` for self-attention
        memory_mask, memory_key_padding_mask, memory_is_causal: the same for attention to memory
        """

        def attend(x: Tensor) -> Tensor:
            y: Tensor = self.self_attn(
                x, x, x, tgt_key_padding_mask, False, tgt_mask, is_causal=tgt_is_causal
            )[0]
            return y

        def attend_memory(x: Tensor) -> Tensor:
            y: Tensor = self.multihead_attn(
                x,
                memory,
                memory,
                memory_key_padding_mask,
                False,
                memory_mask,
                is_causal=memory_is_causal,
            )[0]
            return y

        return self._run(tgt, (attend, attend_memory))
