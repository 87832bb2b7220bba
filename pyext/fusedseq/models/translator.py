"""The Transformer of "Attention Is All You Need" (Vaswani et al., 2017).

The model of the experiments en-es/... and en-fr/...
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from fusedseq import fused
from fusedseq.models.decoder_cache import DecoderCache
from fusedseq.models.settings_check import check_heads, check_probabilities, check_sizes
from fusedseq.models.transformer_layers import Decoder, Encoder
from fusedseq.nn import (
    ALiBi,
    Dropout,
    Embedding,
    LearnedPositions,
    Operators,
    RelativeBias,
    RelativeKeys,
    Rotary,
    SinusoidalPositions,
)
from fusedseq.nn.initialization import reset_in_order
from fusedseq.nn.relative_positions import RelativePositions

PADDING = 0  # the id of padding


@dataclass(frozen=True)
class TranslatorSettings:
    """The settings of a translator; the defaults are those of en-es/base."""

    embedding: int = 512  # the width of the embedding
    heads: int = 8  # attention heads, a number that divides the width
    layers: int = 6  # of the encoder, and of the decoder
    feedforward: int = 2048  # the inner width of the feed-forward part
    # Of embeddings, of what sublayers add, of inner activations and of attention probabilities.
    dropout: float = 0.1
    # Norms come before the sublayers and at the end of both stacks, not after the sublayers.
    prenorm: bool = True
    # "sinusoidal" or "learned", which are added to the embeddings; "relative", "relative-bias",
    # "rope" or "alibi", in self-attention; or "none".
    positions: str = "sinusoidal"
    max_length: int = 90  # the number of "learned" positions
    max_distance: int = 16  # the largest distance of "relative" positions (Shaw et al., 2018)
    tied: bool = False  # the output's weight is the embedding of the target words
    label_smoothing: float = 0.0  # in training mode

    def __post_init__(self) -> None:
        check_sizes(self, "embedding", "heads", "layers", "feedforward", "max_length")
        check_probabilities(self, "dropout", "label_smoothing")


# Positions of self-attention, from the settings and whether they are for the decoder. Attention to
# the source has no positions.
ATTENTION_POSITIONS: dict[str, Callable[[TranslatorSettings, bool], RelativePositions]] = {
    "relative": lambda s, decoder: RelativeKeys(s.max_distance, s.embedding // s.heads),
    "relative-bias": lambda s, decoder: RelativeBias(s.heads, bidirectional=not decoder),
    "rope": lambda s, decoder: Rotary(s.embedding // s.heads),
    "alibi": lambda s, decoder: ALiBi(s.heads),
}
# Positions that are added to the embeddings.
ADDED_POSITIONS: dict[str, Callable[[TranslatorSettings, Operators], nn.Module]] = {
    "sinusoidal": lambda s, ops: SinusoidalPositions(
        s.embedding, s.dropout, batch_first=True, ops=ops
    ),
    "learned": lambda s, ops: LearnedPositions(
        s.max_length, s.embedding, s.dropout, batch_first=True, ops=ops
    ),
}
POSITIONS = (*ADDED_POSITIONS, *ATTENTION_POSITIONS, "none")


class EmbeddedWords(nn.Module):
    """Word embeddings times sqrt(E), plus positions, with dropout; weights from N(0, 1/E)."""

    def __init__(self, vocabulary: int, s: TranslatorSettings, ops: Operators) -> None:
        super().__init__()
        self.embedding = Embedding(vocabulary, s.embedding, ops=ops)
        self._draw_embedding()
        added = s.positions in ADDED_POSITIONS
        self.positions = ADDED_POSITIONS[s.positions](s, ops) if added else None
        # The modules of added positions have dropout of their own.
        self.dropout = Dropout(0.0 if added else s.dropout, ops=ops)

    def reset_parameters(self) -> None:
        """Draws the embedding from N(0, 1/E), and learned positions as `LearnedPositions`."""
        self.embedding.reset_parameters()  # its draw is part of the constructor's order
        self._draw_embedding()
        reset_in_order((self.positions,))

    def _draw_embedding(self) -> None:
        nn.init.normal_(self.embedding.weight, std=self.embedding.embedding_dim**-0.5)

    def forward(self, ids: Tensor, offset: int = 0) -> Tensor:
        """Embeds ids (B, L) int64 whose first position is `offset`; returns (B, L, E)."""
        x: Tensor = self.embedding(ids) * math.sqrt(self.embedding.embedding_dim)
        y: Tensor = self.dropout(x) if self.positions is None else self.positions(x, offset)
        return y


class Translator(nn.Module):
    """An encoder reads the source sentence, and a decoder writes the target word by word.

    source_vocabulary, target_vocabulary: numbers of words    settings: see TranslatorSettings
    ops: `fusedseq.fused`, `fusedseq.reference` or `fusedseq.models.torch_mha`
    Errors: ValueError for positions that are not in POSITIONS.

    Each layer has its own relative positions (T5 shares one RelativeBias among its layers). ALiBi's
    biases depend on distances alone: with them the encoder does not distinguish left from right.
    The decoder does, because it sees only the left.
    """

    def __init__(
        self,
        source_vocabulary: int,
        target_vocabulary: int,
        settings: TranslatorSettings,
        *,
        ops: Operators = fused,
    ) -> None:
        super().__init__()
        s = self.settings = settings
        check_heads(s)
        if s.positions not in POSITIONS:
            known = f"{', '.join(POSITIONS[:-1])} or {POSITIONS[-1]}"
            raise ValueError(f"Translator: positions must be {known}, got {s.positions!r}")
        self.source_words = EmbeddedWords(source_vocabulary, s, ops)
        self.target_words = EmbeddedWords(target_vocabulary, s, ops)
        self.encoder = Encoder(**self._stack_options(ops, decoder=False))
        self.decoder = Decoder(**self._stack_options(ops, decoder=True))
        self.output = None if s.tied else nn.Linear(s.embedding, target_vocabulary, bias=False)
        self.output_bias = nn.Parameter(torch.zeros(target_vocabulary))
        self._linear, self._linear_cross_entropy = ops.linear, ops.linear_cross_entropy
        self.has_cache: bool = getattr(ops, "HAS_CACHE", True)

    def reset_parameters(self) -> None:
        """Draws all parameters as the constructor does, in its order."""
        reset_in_order(self.children())
        nn.init.zeros_(self.output_bias)

    def _stack_options(self, ops: Operators, decoder: bool) -> dict[str, Any]:
        s = self.settings
        create = ATTENTION_POSITIONS.get(s.positions)
        return {
            "num_layers": s.layers,
            "E": s.embedding,
            "num_heads": s.heads,
            "dim_feedforward": s.feedforward,
            "dropout": s.dropout,
            "prenorm": s.prenorm,
            "final_norm": s.prenorm,
            "positions": None if create is None else partial(create, s, decoder),
            "ops": ops,
        }

    def encode(self, source: Tensor, lengths: Tensor | None = None) -> Tensor:
        """Encodes source (B, S) int64; returns the memory of the decoder, (B, S, E).

        lengths: (B,) int64, the number of words of each sentence; S by default
        """
        memory: Tensor = self.encoder(self.source_words(source), lengths)
        return memory

    def decode(
        self,
        prefix: Tensor,
        memory: Tensor | None = None,
        lengths: Tensor | None = None,
        cache: DecoderCache | None = None,
    ) -> Tensor:
        """Returns the decoder's output for each word of a prefix, (B, T, E).

        The output for a word depends on that word and those before it.
        prefix: (B, T) int64, from the first word on    memory: as `encode` returns it
        lengths: of the source
        cache: instead of memory and lengths. Then prefix is (rows, T), the words after those that
            were decoded with the cache before, and usually T is 1. Inference only, under
            torch.no_grad()
        """
        x = self.target_words(prefix, 0 if cache is None else cache.length)
        y: Tensor = self.decoder(x, memory, lengths, cache)
        return y

    def cache(
        self, memory: Tensor, lengths: Tensor | None = None, *, max_length: int, beam: int = 1
    ) -> DecoderCache:
        """Returns a DecoderCache for `decode` of B * beam rows.

        The hypotheses of memory's row b are the rows b * beam to b * beam + beam - 1;
        `reorder(parents)` of the cache continues other hypotheses.
        memory: (B, S, E)    lengths: (B,) int64 or None
        max_length: the largest number of words of a prefix
        """
        return self.decoder.cache(memory, lengths, max_length, beam)

    def forward(self, source: Tensor, source_lengths: Tensor | None, prefix: Tensor) -> Tensor:
        """Returns the decoder's output for the words of a target, (B, T, E).

        source: (B, S) int64    source_lengths: (B,) int64, or None for S
        prefix: (B, T) int64, the target without its last word. Its length is not needed: no output
            depends on the positions after it
        """
        return self.decode(prefix, self.encode(source, source_lengths), source_lengths)

    @property
    def output_weight(self) -> Tensor:
        """The output layer's weight, (V, E)."""
        return self.target_words.embedding.weight if self.output is None else self.output.weight

    def logits(self, y: Tensor) -> Tensor:
        """Returns the logits (..., V) of y (..., E)."""
        return self._linear(y, self.output_weight, self.output_bias)

    def cross_entropy(
        self, y: Tensor, targets: Tensor, reduction: str = "mean", **details: Any
    ) -> Any:
        """Returns the cross-entropy in nats: a scalar, or (B, T) with reduction "none".

        Labels are smoothed in training mode only.
        y: (B, T, E)
        targets: (B, T) int64, the target without its first word; 0, the padding, is ignored
        details: return_details of the operator `linear_cross_entropy`, whose results are returned
        """
        smoothing = self.settings.label_smoothing if self.training else 0.0
        return self._linear_cross_entropy(
            y,
            self.output_weight,
            targets,
            self.output_bias,
            ignore_index=PADDING,
            label_smoothing=smoothing,
            reduction=reduction,
            **details,
        )
