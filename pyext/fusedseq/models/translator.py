"""The Transformer of "Attention Is All You Need" (Vaswani et al., 2017), for the rows en-es/... and en-fr/..."""

import math
from dataclasses import dataclass

import torch
from torch import nn

from fusedseq import fused
from fusedseq.models.transformer_layers import Decoder, Encoder
from fusedseq.nn import (
    ALiBi,
    Dropout,
    Embedding,
    LearnedPositions,
    RelativeBias,
    RelativeKeys,
    Rotary,
    SinusoidalPositions,
)

PADDING = 0


@dataclass(frozen=True)
class TranslatorSettings:
    """What a translator is made of; the defaults are row en-es/base."""

    embedding: int = 512  # E
    heads: int = 8
    layers: int = 6  # of the encoder, and as many of the decoder
    feedforward: int = 2048
    dropout: float = 0.1  # of embeddings, of what sublayers add, of activations and of probabilities
    prenorm: bool = True  # with a norm at the end of either stack; else post-norm
    positions: str = "sinusoidal"  # see POSITIONS
    max_length: int = 90  # of "learned" positions
    max_distance: int = 16  # that "relative" positions tell apart (Shaw et al., 2018)
    tied: bool = False  # the output's weight is the embedding of the target words
    label_smoothing: float = 0.0


# Of self-attention, for the layers of encoder and decoder; the attention to the source has no positions.
ATTENTION_POSITIONS = {
    "relative": lambda s, decoder: RelativeKeys(s.max_distance, s.embedding // s.heads),
    "relative-bias": lambda s, decoder: RelativeBias(s.heads, bidirectional=not decoder),
    "rope": lambda s, decoder: Rotary(s.embedding // s.heads),
    "alibi": lambda s, decoder: ALiBi(s.heads),
}
ADDED_POSITIONS = {
    "sinusoidal": lambda s, ops: SinusoidalPositions(s.embedding, s.dropout, batch_first=True, ops=ops),
    "learned": lambda s, ops: LearnedPositions(s.max_length, s.embedding, s.dropout, batch_first=True, ops=ops),
}
POSITIONS = (*ADDED_POSITIONS, *ATTENTION_POSITIONS, "none")


class _Words(nn.Module):
    """Embeddings, sqrt(E) times a weight that is drawn from N(0, 1/E), with their positions, dropped.

    forward: ids (B, L) int64, offset=0, the position of the first -> (B, L, E)
    """

    def __init__(self, vocabulary, s, ops):
        super().__init__()
        self.embedding = Embedding(vocabulary, s.embedding, ops=ops)
        nn.init.normal_(self.embedding.weight, std=s.embedding**-0.5)
        added = s.positions in ADDED_POSITIONS
        self.positions = ADDED_POSITIONS[s.positions](s, ops) if added else None
        self.dropout = Dropout(0.0 if added else s.dropout, ops=ops)

    def forward(self, ids, offset=0):
        x = self.embedding(ids) * math.sqrt(self.embedding.embedding_dim)
        return self.dropout(x) if self.positions is None else self.positions(x, offset)


class Translator(nn.Module):
    """An encoder reads the source, a decoder writes the target word by word.

    source_vocabulary, target_vocabulary: their numbers of words    settings: a TranslatorSettings
    ops: `fusedseq.fused`, `fusedseq.reference` or `fusedseq.models.torch_mha`
    Relative positions are each layer's own (T5 shares one RelativeBias among its layers). ALiBi's biases are of distances alone:
    the encoder does not tell left from right by them, as the decoder does, which sees the left alone.
    """

    def __init__(self, source_vocabulary, target_vocabulary, settings, *, ops=fused):
        super().__init__()
        s = self.settings = settings
        if s.positions not in POSITIONS:
            raise ValueError(f"Translator: positions must be {', '.join(POSITIONS)}, got {s.positions!r}")
        self.source_words = _Words(source_vocabulary, s, ops)
        self.target_words = _Words(target_vocabulary, s, ops)
        self.encoder, self.decoder = (self._stack(build, ops) for build in (Encoder, Decoder))
        self.output = None if s.tied else nn.Linear(s.embedding, target_vocabulary, bias=False)
        self.output_bias = nn.Parameter(torch.zeros(target_vocabulary))
        self._linear, self._linear_cross_entropy = ops.linear, ops.linear_cross_entropy
        self.has_cache = getattr(ops, "HAS_CACHE", True)

    def _stack(self, build, ops):
        s, positions = self.settings, None
        if s.positions in ATTENTION_POSITIONS:
            positions = lambda: ATTENTION_POSITIONS[s.positions](s, build is Decoder)  # noqa: E731
        return build(
            s.layers, s.embedding, s.heads, s.feedforward, s.dropout, prenorm=s.prenorm, final_norm=s.prenorm,
            positions=positions, ops=ops,
        )  # fmt: skip

    def encode(self, source, lengths=None):
        """source: (B, S) int64    lengths: (B,) int64, the words that there are, S by default    returns memory, (B, S, E)"""
        return self.encoder(self.source_words(source), lengths)

    def decode(self, prefix, memory=None, lengths=None, cache=None):
        """The decoder's output for each word of a prefix, which sees that word and those before it.

        prefix: (B, T) int64, from the first word on    memory, lengths: of `encode`    returns (B, T, E)
        With a `cache` instead of memory and lengths, prefix is what follows the words that went through it already: (rows,
        T), and often T is 1. Inference only, under torch.no_grad().
        """
        x = self.target_words(prefix, 0 if cache is None else cache.length)
        return self.decoder(x, memory, lengths, cache)

    def cache(self, memory, lengths=None, *, max_length, beam=1):
        """A DecoderCache for `decode`: B * beam rows, the hypotheses of memory's row b being b * beam to b * beam + beam - 1;
        its `reorder(parents)` goes on from other ones. max_length: the most words of a prefix"""
        return self.decoder.cache(memory, lengths, max_length, beam)

    def forward(self, source, source_lengths, prefix):
        """source: (B, S), prefix: (B, T) int64: the target without its last word    source_lengths: (B,) int64
        returns (B, T, E). What follows a target's end is never seen by what stands before it, so that its length does not
        matter."""
        return self.decode(prefix, self.encode(source, source_lengths), source_lengths)

    @property
    def output_weight(self):
        return self.target_words.embedding.weight if self.output is None else self.output.weight

    def logits(self, y):
        """(..., E) -> (..., V)"""
        return self._linear(y, self.output_weight, self.output_bias)

    def cross_entropy(self, y, targets, reduction="mean", **details):
        """y: (B, T, E)    targets: (B, T) int64: the target without its first word; 0, the padding, is ignored
        returns nats, a scalar, or (B, T) with "none"; with label smoothing in training alone
        details: return_details, of the operator"""
        smoothing = self.settings.label_smoothing if self.training else 0.0
        return self._linear_cross_entropy(
            y, self.output_weight, targets, self.output_bias, ignore_index=PADDING, label_smoothing=smoothing,
            reduction=reduction, **details,
        )  # fmt: skip
