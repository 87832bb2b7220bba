"""Transformer layers and stacks of them, post-norm (Vaswani et al., 2017) or pre-norm.

In pre-norm (Wang et al., 2019) the result of a sublayer is added to the residual in the norm of the
next sublayer, in one pass. Therefore a layer takes and returns two tensors: x, to which dropout and
the residual connection are not yet applied, and the residual s. At the input of a stack, and in
post-norm, s is None.
"""

from collections.abc import Callable, Sequence
from typing import Any, Generic, TypeVar

from torch import Tensor, nn

from fusedseq import fused
from fusedseq.fused import check
from fusedseq.models.decoder_cache import DecoderCache
from fusedseq.nn import (
    Dropout,
    FeedForward,
    KeyValueCache,
    MultiheadAttention,
    Operators,
    ResidualLayerNorm,
)
from fusedseq.nn.initialization import reset_in_order
from fusedseq.nn.relative_positions import RelativePositions

XAndResidual = tuple[Tensor, Tensor | None]  # x and s, (B, L, E) each


class TransformerLayer(nn.Module):
    """The base class of the layers: self-attention, a feed-forward, and a norm for each sublayer.

    E: model width    num_heads: of attention    dim_feedforward: inner width
    dropout: of what a sublayer adds to the residual
    attention_dropout: of the attention probabilities, by default `dropout`
    feed_forward_dropout: of the inner activations, by default `dropout`
    prenorm: norms come before the sublayers    activation: as in FeedForward
    scale: of the logits, by default 1/sqrt(E / num_heads)
    positions: creates the positions module of the layer's self-attention; None for none
    eps: of the norms    bias: of the projections, the feed-forward and the norms
    ops: an operator set
    """

    norms: tuple[str, ...]  # the attributes of the norms, one for each sublayer
    norm1: ResidualLayerNorm
    norm2: ResidualLayerNorm

    def __init__(
        self,
        E: int,
        num_heads: int,
        dim_feedforward: int,
        dropout: float = 0.1,
        *,
        attention_dropout: float | None = None,
        feed_forward_dropout: float | None = None,
        prenorm: bool = False,
        activation: str = "relu",
        scale: float | None = None,
        positions: Callable[[], RelativePositions] | None = None,
        eps: float = 1e-5,
        bias: bool = True,
        ops: Operators = fused,
    ) -> None:
        super().__init__()
        inner = dropout if feed_forward_dropout is None else feed_forward_dropout
        self._attention_dropout = dropout if attention_dropout is None else attention_dropout
        self.self_attn = self._attention(
            E,
            num_heads,
            bias,
            ops,
            scale=scale,
            positions=None if positions is None else positions(),
        )
        self.feed_forward = FeedForward(E, dim_feedforward, inner, activation, bias=bias, ops=ops)
        for name in self.norms:
            norm = ResidualLayerNorm(E, dropout, eps=eps, bias=bias, prenorm=prenorm, ops=ops)
            self.add_module(name, norm)

    def reset_parameters(self) -> None:
        """Draws the parameters of all sublayers as their constructors do, in their order."""
        reset_in_order(self.children())

    def _attention(
        self, E: int, num_heads: int, bias: bool, ops: Operators, **options: Any
    ) -> MultiheadAttention:
        # The operator set models.torch_mha has a whole attention module instead of an operator.
        module = getattr(ops, "MultiheadAttention", MultiheadAttention)
        attention: MultiheadAttention = module(
            E, num_heads, self._attention_dropout, bias, batch_first=True, ops=ops, **options
        )
        return attention


def connect(
    norm: ResidualLayerNorm, sublayer: Callable[[Tensor], Tensor], x: Tensor, s: Tensor | None
) -> XAndResidual:
    """Applies one sublayer with its residual connection and norm: (x, s) -> (x, s)."""
    if not norm.prenorm:
        return norm(sublayer(x), x), None
    y, s = norm(x, s)
    return sublayer(y), s


class EncoderLayer(TransformerLayer):
    """Self-attention, then a feed-forward; arguments as in `TransformerLayer`."""

    norms = "norm1", "norm2"

    def forward(
        self, x: Tensor, s: Tensor | None = None, key_lengths: Tensor | None = None
    ) -> XAndResidual:
        """Applies the layer to x (B, L, E), with residual s as x or None; returns x and s.

        key_lengths: (B,) int64, the number of keys of each row of the batch; L by default
        """

        def attend(y: Tensor) -> Tensor:
            attended: Tensor = self.self_attn(y, y, y, key_lengths=key_lengths)[0]
            return attended

        x, s = connect(self.norm1, attend, x, s)
        return connect(self.norm2, self.feed_forward, x, s)


class DecoderLayer(TransformerLayer):
    """Causal self-attention, attention to an encoder's output, then a feed-forward.

    Arguments as in `TransformerLayer`.
    """

    norms = "norm1", "norm2", "norm3"
    norm3: ResidualLayerNorm

    def __init__(
        self,
        E: int,
        num_heads: int,
        *args: Any,
        bias: bool = True,
        ops: Operators = fused,
        **options: Any,
    ) -> None:
        super().__init__(E, num_heads, *args, bias=bias, ops=ops, **options)
        self.multihead_attn = self._attention(E, num_heads, bias, ops, scale=options.get("scale"))

    def forward(
        self,
        x: Tensor,
        s: Tensor | None = None,
        memory: Tensor | None = None,
        memory_lengths: Tensor | None = None,
        cache: tuple[KeyValueCache | None, KeyValueCache | None] = (None, None),
    ) -> XAndResidual:
        """Applies the layer to x (B, T, E), with residual s as x or None; returns x and s.

        memory: (B, S, E), the encoder's output    memory_lengths: (B,) int64, S by default
        cache: the caches of target positions and of memory. With them x holds the positions after
            those in the cache, and memory is None, because its keys are in the cache
        """
        target_cache, memory_cache = cache

        def attend_target(y: Tensor) -> Tensor:
            attended: Tensor = self.self_attn(y, y, y, is_causal=True, cache=target_cache)[0]
            return attended

        def attend_memory(y: Tensor) -> Tensor:
            attended: Tensor = self.multihead_attn(
                y, memory, memory, key_lengths=memory_lengths, cache=memory_cache
            )[0]
            return attended

        x, s = connect(self.norm1, attend_target, x, s)
        x, s = connect(self.norm2, attend_memory, x, s)
        return connect(self.norm3, self.feed_forward, x, s)


Layer = TypeVar("Layer", bound=TransformerLayer)


class Stack(nn.Module, Generic[Layer]):
    """The base class of Encoder and Decoder: layers, and with `final_norm` a norm of their output.

    Pre-norm's residual is added after the last layer.
    Errors: ValueError for num_layers below 1.
    """

    layer: type[Layer]

    def __init__(
        self,
        num_layers: int,
        E: int,
        num_heads: int,
        dim_feedforward: int,
        dropout: float = 0.1,
        *,
        prenorm: bool = False,
        final_norm: bool = False,
        eps: float = 1e-5,
        bias: bool = True,
        ops: Operators = fused,
        **options: Any,
    ) -> None:
        super().__init__()
        if num_layers < 1:
            raise ValueError(
                f"{type(self).__name__}: num_layers must be at least 1, got {num_layers}"
            )
        shared: dict[str, Any] = {"prenorm": prenorm, "eps": eps, "bias": bias, "ops": ops}
        layers = [
            self.layer(E, num_heads, dim_feedforward, dropout, **shared, **options)
            for _ in range(num_layers)
        ]
        self.layers = nn.ModuleList(layers)
        # In post-norm the output of the last layer already includes its residual.
        dropout = dropout if prenorm else 0.0
        self.norm = (
            ResidualLayerNorm(E, dropout, eps=eps, bias=bias, ops=ops) if final_norm else None
        )
        self.dropout = Dropout(dropout, ops=ops)
        if prenorm:
            # The input of a stack has no residual, and its embeddings have dropout of their own.
            layers[0].norm1.dropout = 0.0

    def reset_parameters(self) -> None:
        """Draws the parameters of all layers as their constructors do, in their order."""
        reset_in_order(self.children())

    def _typed_layers(self) -> Sequence[Layer]:
        """Returns `layers` with the type of the layers, which ModuleList does not declare."""
        return list(self.layers)  # type: ignore[arg-type]  # every one is built in __init__

    def _run(self, x: Tensor, call: Callable[[int, Layer, Tensor, Any], XAndResidual]) -> Tensor:
        """Runs the layers by call(i, layer, x, s) -> (x, s), then the final norm or residual."""
        s: Tensor | None = None
        for i, layer in enumerate(self._typed_layers()):
            x, s = call(i, layer, x, s)
        if self.norm is not None:
            normalized: Tensor = self.norm(x, s)
            return normalized
        if s is None:
            return x
        dropped: Tensor = self.dropout(x)
        return s + dropped


class Encoder(Stack[EncoderLayer]):
    """A stack of `num_layers` EncoderLayers.

    num_layers, E, num_heads, dim_feedforward, dropout, final_norm, and as keywords the other
    arguments of EncoderLayer
    """

    layer = EncoderLayer

    def forward(self, x: Tensor, key_lengths: Tensor | Sequence[int] | None = None) -> Tensor:
        """Encodes x (B, L, E); returns (B, L, E).

        key_lengths: (B,) int64 or int32, or a list: the number of positions of each row of the
            batch; L by default
        """
        key_lengths = check.to_lengths(key_lengths, x.device)
        return self._run(x, lambda i, layer, x, s: layer(x, s, key_lengths))


class Decoder(Stack[DecoderLayer]):
    """A stack of `num_layers` DecoderLayers; arguments as of Encoder."""

    layer = DecoderLayer

    def forward(
        self,
        x: Tensor,
        memory: Tensor | None = None,
        memory_lengths: Tensor | Sequence[int] | None = None,
        cache: DecoderCache | None = None,
    ) -> Tensor:
        """Decodes x (B, T, E); returns (B, T, E).

        memory: (B, S, E), the encoder's output
        memory_lengths: (B,) int64 or int32, or a list; S by default
        cache: a DecoderCache, instead of memory and memory_lengths
        """
        if cache is None:
            memory_lengths = check.to_lengths(memory_lengths, x.device)
            return self._run(x, lambda i, layer, x, s: layer(x, s, memory, memory_lengths))
        lengths, caches = cache.memory_lengths, cache.layers
        y = self._run(x, lambda i, layer, x, s: layer(x, s, None, lengths, caches[i]))
        cache.length += x.size(1)
        return y

    def cache(
        self,
        memory: Tensor,
        memory_lengths: Tensor | Sequence[int] | None,
        max_length: int,
        beam: int = 1,
    ) -> DecoderCache:
        """Returns a DecoderCache for `beam` hypotheses of each row of memory.

        The hypotheses of row b are the rows b * beam to b * beam + beam - 1. The keys of memory are
        computed here, once.
        memory: (B, S, E)    memory_lengths: (B,) int64 or int32, a list, or None
        max_length: the largest number of target positions
        """
        rows, caches = len(memory) * beam, []
        for layer in self._typed_layers():
            memory_cache = layer.multihead_attn.cache(len(memory), memory.size(1))
            layer.multihead_attn.fill(memory_cache, memory, memory)
            caches.append((layer.self_attn.cache(rows, max_length), memory_cache))
        cache = DecoderCache(caches, check.to_lengths(memory_lengths, memory.device))
        if beam > 1:
            cache.share_memory(beam)
        return cache
