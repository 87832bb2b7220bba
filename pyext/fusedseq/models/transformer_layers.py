"""The layers of the Transformers in this folder, post-norm (Vaswani et al., 2017) or pre-norm (Wang et al., 2019).

Pre-norm adds a sublayer's result to the residual in the next sublayer's norm, in one pass. So a layer takes and returns two
tensors: x, still to be dropped and added, and the residual s; at the bottom of a stack, and in post-norm, s is None.
"""

from torch import nn

from fusedseq import fused
from fusedseq.nn import Dropout, FeedForward, KeyValueCache, MultiheadAttention, ResidualLayerNorm


class _Layer(nn.Module):
    """Attention to itself and a feed-forward, and the norms of as many sublayers.

    E, num_heads, dim_feedforward: sizes    dropout: of what a sublayer adds    attention_dropout: of the probabilities
    feed_forward_dropout: of the inner activations; both by default as `dropout`    prenorm: norms before the sublayers
    activation: as in FeedForward    scale: of the logits, by default 1/sqrt(E / num_heads)
    positions: makes the positions module of the layer's self-attention; None for none    eps: of the norms
    bias: of the projections, the feed-forward and the norms    ops: an operator set
    """

    norms: tuple[str, ...]

    def __init__(
        self, E, num_heads, dim_feedforward, dropout=0.1, *, attention_dropout=None, feed_forward_dropout=None,
        prenorm=False, activation="relu", scale=None, positions=None, eps=1e-5, bias=True, ops=fused,
    ):  # fmt: skip
        super().__init__()
        inner = dropout if feed_forward_dropout is None else feed_forward_dropout
        self._attention_dropout = dropout if attention_dropout is None else attention_dropout
        self.self_attn = self._attention(
            E, num_heads, bias, ops, scale=scale, positions=None if positions is None else positions()
        )
        self.feed_forward = FeedForward(E, dim_feedforward, inner, activation, bias=bias, ops=ops)
        for name in self.norms:
            self.add_module(name, ResidualLayerNorm(E, dropout, eps=eps, bias=bias, prenorm=prenorm, ops=ops))

    def _attention(self, E, num_heads, bias, ops, **options):
        build = getattr(ops, "MultiheadAttention", MultiheadAttention)  # torch_mha has a whole module, not an operator
        return build(E, num_heads, self._attention_dropout, bias, batch_first=True, ops=ops, **options)


def connect(norm, sublayer, x, s):
    """One sublayer in its residual connection: (x, s) -> (x, s)."""
    if not norm.prenorm:
        return norm(sublayer(x), x), None
    y, s = norm(x, s)
    return sublayer(y), s


class EncoderLayer(_Layer):
    """Self-attention, then a feed-forward; modules and arguments as in `_Layer`.

    forward: x (B, L, E), s as x or None, key_lengths (B,) int64 or None -> x, s
    """

    norms = "norm1", "norm2"

    def forward(self, x, s=None, key_lengths=None):
        x, s = connect(self.norm1, lambda y: self.self_attn(y, y, y, key_lengths=key_lengths)[0], x, s)
        return connect(self.norm2, self.feed_forward, x, s)


class DecoderLayer(_Layer):
    """Self-attention that sees no later position, attention to an encoder's output, then a feed-forward.

    forward: x (B, T, E), s as x or None, memory (B, S, E), memory_lengths (B,) int64 or None -> x, s; with `cache`, a pair
    of KeyValueCaches, x is what comes after the positions it holds, and the memory's keys are in it: memory is None
    """

    norms = "norm1", "norm2", "norm3"

    def __init__(self, E, num_heads, *args, bias=True, ops=fused, **options):
        super().__init__(E, num_heads, *args, bias=bias, ops=ops, **options)
        self.multihead_attn = self._attention(E, num_heads, bias, ops, scale=options.get("scale"))

    def forward(self, x, s=None, memory=None, memory_lengths=None, cache=(None, None)):
        own, of_memory = cache
        x, s = connect(self.norm1, lambda y: self.self_attn(y, y, y, is_causal=True, cache=own)[0], x, s)

        def attend_memory(y):
            return self.multihead_attn(y, memory, memory, key_lengths=memory_lengths, cache=of_memory)[0]

        x, s = connect(self.norm2, attend_memory, x, s)
        return connect(self.norm3, self.feed_forward, x, s)


class _Stack(nn.Module):
    """Layers, and with `final_norm` a norm of what they give; pre-norm's residual is added at the end."""

    layer: type[_Layer]

    def __init__(
        self, num_layers, E, num_heads, dim_feedforward, dropout=0.1, *, prenorm=False, final_norm=False, eps=1e-5,
        bias=True, ops=fused, **options,
    ):  # fmt: skip
        super().__init__()
        if num_layers < 1:
            raise ValueError(f"{type(self).__name__}: num_layers must be at least 1, got {num_layers}")
        shared = {"prenorm": prenorm, "eps": eps, "bias": bias, "ops": ops}
        self.layers = nn.ModuleList([
            self.layer(E, num_heads, dim_feedforward, dropout, **shared, **options) for _ in range(num_layers)
        ])  # fmt: skip
        dropout = dropout if prenorm else 0.0  # post-norm's last result is complete
        self.norm = ResidualLayerNorm(E, dropout, eps=eps, bias=bias, ops=ops) if final_norm else None
        self.dropout = Dropout(dropout, ops=ops)
        if prenorm:
            self.layers[0].norm1.dropout = 0.0  # the input of a stack is added to nothing

    def _run(self, x, call):
        """call(i, layer, x, s) -> x, s"""
        s = None
        for i, layer in enumerate(self.layers):
            x, s = call(i, layer, x, s)
        if self.norm is not None:
            return self.norm(x, s)
        return x if s is None else s + self.dropout(x)


class Encoder(_Stack):
    """A stack of `num_layers` EncoderLayers.

    num_layers, E, num_heads, dim_feedforward, dropout, and by name final_norm and what EncoderLayer takes
    forward: x (B, L, E), key_lengths (B,) int64 or None, the positions that there are of each row -> (B, L, E)
    """

    layer = EncoderLayer

    def forward(self, x, key_lengths=None):
        return self._run(x, lambda i, layer, x, s: layer(x, s, key_lengths))


class Decoder(_Stack):
    """A stack of `num_layers` DecoderLayers; arguments as of Encoder.

    forward: x (B, T, E), memory (B, S, E), memory_lengths (B,) int64 or None -> (B, T, E); or x and a DecoderCache
    """

    layer = DecoderLayer

    def forward(self, x, memory=None, memory_lengths=None, cache=None):
        if cache is None:
            return self._run(x, lambda i, layer, x, s: layer(x, s, memory, memory_lengths))
        y = self._run(x, lambda i, layer, x, s: layer(x, s, None, cache.memory_lengths, cache.layers[i]))
        cache.length += x.size(1)
        return y

    def cache(self, memory, memory_lengths, max_length, beam=1):
        """A DecoderCache for `beam` hypotheses of each row of memory, row b's being b * beam and on, and `max_length`
        positions. The keys of memory are computed here, once."""
        rows, layers = len(memory) * beam, []
        for layer in self.layers:
            of_memory = layer.multihead_attn.cache(len(memory), memory.size(1))
            layer.multihead_attn.fill(of_memory, memory, memory)
            layers.append((layer.self_attn.cache(rows, max_length), of_memory))
        cache = DecoderCache(layers, memory_lengths)
        if beam > 1:
            cache.share_memory(beam)
        return cache


class DecoderCache:
    """What the layers of a Decoder keep of a decoding.

    layers: for each the KeyValueCaches of its own positions and of the memory
    memory_lengths: (rows,) int64 or None, of each hypothesis's source    length: the positions held
    """

    def __init__(self, layers: list[tuple[KeyValueCache, KeyValueCache]], memory_lengths):
        self.layers, self.memory_lengths, self.length = layers, memory_lengths, 0

    def share_memory(self, beam):
        self._reorder_memory(self.layers[0][1].table()[:, 0].repeat_interleave(beam))

    def reorder(self, parents):
        """Hypothesis b goes on from what hypothesis parents[b] was; parents: (rows,) int64."""
        for own, _ in self.layers:
            own.reorder(parents)
        self._reorder_memory(parents)

    def _reorder_memory(self, parents):
        for _, of_memory in self.layers:
            of_memory.reorder(parents)
        if self.memory_lengths is not None:
            self.memory_lengths = self.memory_lengths[parents]
