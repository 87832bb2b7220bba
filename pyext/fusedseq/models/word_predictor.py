"""Prediction of the middle word of a context by a Transformer over the surrounding words.

After CBOW (Mikolov et al., 2013); the model of the experiments words/...
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from fusedseq import fused
from fusedseq.models.settings_check import check_heads, check_probabilities, check_sizes
from fusedseq.models.transformer_layers import Encoder
from fusedseq.nn import Embedding, FeedForward, LearnedPositions, Operators, ResidualLayerNorm
from fusedseq.nn.initialization import reset_in_order

PADDING = 0  # the id of positions before a line's start and after its end; it is never masked
POOLING: dict[str, Callable[[Tensor], Tensor]] = {  # (B, L, E) -> (B, E)
    "sum": lambda x: x.sum(1),
    "mean": lambda x: x.mean(1),
    "max": lambda x: x.amax(1),
}


@dataclass(frozen=True)
class WordPredictorSettings:
    """The settings of a word predictor; the defaults are those of words/base."""

    embedding: int = 256  # the width of the embedding
    context: int = 6  # words in a context, an even number: half of them on each side
    layers: int = 1  # encoder layers
    heads: int = 1  # attention heads, a number that divides the width
    feedforward: int = 512  # the inner width of the feed-forward part
    # Of the outputs of attention and feed-forward and of the inner activations of the feed-forward,
    # but not of the attention probabilities.
    dropout: float = 0.1
    prenorm: bool = False  # norms come before the sublayers, not after them
    # norm2(feedforward(norm1(x))) after the layers, without a residual connection
    extra_feedforward: bool = False
    pooling: str = "sum"  # over the positions: "sum", "mean" or "max"
    tied: bool = False  # the output's weight is the embedding
    # The probability in training that a context word is masked and predicted too.
    masking: float = 0.0

    def __post_init__(self) -> None:
        check_sizes(self, "embedding", "context", "layers", "heads", "feedforward")
        check_probabilities(self, "dropout")


class WordPredictor(nn.Module):
    """Embedding + learned positions -> encoder layers -> pooling -> linear without a bias.

    vocabulary: V    settings: see WordPredictorSettings    ops: an operator set
    A tied embedding is initialized from N(0, 1/E), because N(0, 1) gives logits of 100 and more; an
    embedding of its own from N(0, 1).
    Errors: ValueError for another pooling or a masking outside [0, 1).
    """

    def __init__(
        self, vocabulary: int, settings: WordPredictorSettings, *, ops: Operators = fused
    ) -> None:
        super().__init__()
        s = self.settings = settings
        check_heads(s)
        if s.pooling not in POOLING:
            raise ValueError(f"WordPredictor: pooling must be sum, mean or max, got {s.pooling!r}")
        if not 0 <= s.masking < 1:
            raise ValueError(f"WordPredictor: masking must be in [0, 1), got {s.masking}")
        E = s.embedding
        self.embedding = Embedding(vocabulary, E, ops=ops)
        self.positions = LearnedPositions(s.context, E, batch_first=True, ops=ops)
        self.encoder = Encoder(
            s.layers,
            E,
            s.heads,
            s.feedforward,
            s.dropout,
            attention_dropout=0.0,
            prenorm=s.prenorm,
            ops=ops,
        )
        self.extra = _extra_feed_forward(s, ops) if s.extra_feedforward else None
        # The vector that replaces the embedding of a masked word.
        self.mask = nn.Parameter(torch.randn(E)) if s.masking else None
        self.output = None if s.tied else nn.Linear(E, vocabulary, bias=False)
        self._draw_tied_embedding()
        self._linear, self._linear_cross_entropy = ops.linear, ops.linear_cross_entropy

    def reset_parameters(self) -> None:
        """Draws all parameters as the constructor does, in its order."""
        reset_in_order((self.embedding, self.positions, self.encoder, self.extra))
        if self.mask is not None:
            nn.init.normal_(self.mask)
        reset_in_order((self.output,))
        self._draw_tied_embedding()

    def _draw_tied_embedding(self) -> None:
        if self.settings.tied:
            nn.init.normal_(self.embedding.weight, std=self.settings.embedding**-0.5)

    def encode(self, context: Tensor, masked: Tensor | None = None) -> Tensor:
        """Encodes a context (B, L) int64; returns (B, L, E).

        masked: (B, L) bool, True for words replaced by the mask vector; requires `settings.masking`
        """
        x: Tensor = self.embedding(context)
        if masked is not None:
            assert self.mask is not None, "masked words need settings.masking"
            x = torch.where(masked[..., None], self.mask, x)
        y: Tensor = self.encoder(self.positions(x))
        return y if self.extra is None else self.extra(y)

    def pool(self, x: Tensor) -> Tensor:
        """Reduces (B, L, E) over the positions to (B, E)."""
        return POOLING[self.settings.pooling](x)

    def forward(self, context: Tensor) -> Tensor:
        """Encodes and pools a context (B, L) int64; returns (B, E)."""
        return self.pool(self.encode(context))

    @property
    def output_weight(self) -> Tensor:
        """The output layer's weight, (V, E)."""
        return self.embedding.weight if self.output is None else self.output.weight

    def logits(self, y: Tensor) -> Tensor:
        """Returns the logits (..., V) of y (..., E)."""
        return self._linear(y, self.output_weight)

    def cross_entropy(
        self, y: Tensor, target: Tensor, reduction: str = "mean", **details: Any
    ) -> Any:
        """Returns the cross-entropy in nats: a scalar, or (...,) with reduction "none".

        y: (..., E)    target: (...,) int64, -100 for a position without a target
        details: return_details of the operator `linear_cross_entropy`, whose results are returned
        """
        return self._linear_cross_entropy(
            y, self.output_weight, target, reduction=reduction, **details
        )

    def objective(self, context: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the objective of training and the loss, scalars.

        context: (B, L) int64    target: (B,) int64
        The loss is the cross-entropy of the middle words. In training with `settings.masking`, the
        objective is the loss plus the cross-entropy of the masked words (Devlin et al., 2019);
        otherwise it is the loss.
        """
        s = self.settings
        if not (self.training and s.masking):
            loss = self.cross_entropy(self(context), target)
            return loss, loss
        masked = (torch.rand(context.shape, device=context.device) < s.masking) & (
            context != PADDING
        )
        x = self.encode(context, masked)
        loss = self.cross_entropy(self.pool(x), target)
        return loss + self.cross_entropy(x, torch.where(masked, context, -100)), loss


def _extra_feed_forward(s: WordPredictorSettings, ops: Operators) -> nn.Sequential:
    return nn.Sequential(
        ResidualLayerNorm(s.embedding, ops=ops),
        FeedForward(s.embedding, s.feedforward, s.dropout, ops=ops),
        ResidualLayerNorm(s.embedding, ops=ops),
    )
