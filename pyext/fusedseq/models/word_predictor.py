"""The word in the middle of its context, predicted by a Transformer over the words around it (after CBOW, Mikolov et al.,
2013): the rows words/..."""

from dataclasses import dataclass

import torch
from torch import nn

from fusedseq import fused
from fusedseq.models.transformer_layers import Encoder
from fusedseq.nn import Embedding, FeedForward, LearnedPositions, ResidualLayerNorm

PADDING = 0  # the id of what is beyond a line's ends, which is never masked
POOLING = {"sum": lambda x: x.sum(1), "mean": lambda x: x.mean(1), "max": lambda x: x.amax(1)}


@dataclass(frozen=True)
class WordPredictorSettings:
    """What a word predictor is made of; the defaults are row words/base."""

    embedding: int = 256  # E
    context: int = 6  # L, words
    layers: int = 1
    heads: int = 1
    feedforward: int = 512
    dropout: float = 0.1  # of what attention and feed-forward add, and inside the feed-forward; none of probabilities
    prenorm: bool = False
    extra_feedforward: bool = False  # norm2(feedforward(norm1(x))) behind the layers, without a residual
    pooling: str = "sum"  # or "mean", "max": over the positions
    tied: bool = False  # the output's weight is the embedding
    masking: float = 0.0  # the probability that in training a word of the context is masked, and predicted too


class WordPredictor(nn.Module):
    """Embedding + learnt positions -> encoder layers -> pooling over the positions -> linear without a bias.

    vocabulary: V    settings: a WordPredictorSettings    ops: an operator set
    A tied embedding is drawn from N(0, 1/E), for N(0, 1) gives logits of 100 and more; an untied one from N(0, 1).
    """

    def __init__(self, vocabulary, settings, *, ops=fused):
        super().__init__()
        s = self.settings = settings
        if s.pooling not in POOLING:
            raise ValueError(f"WordPredictor: pooling must be {', '.join(POOLING)}, got {s.pooling!r}")
        if not 0 <= s.masking < 1:
            raise ValueError(f"WordPredictor: masking must be in [0, 1), got {s.masking}")
        E = s.embedding
        self.embedding = Embedding(vocabulary, E, ops=ops)
        self.positions = LearnedPositions(s.context, E, batch_first=True, ops=ops)
        self.encoder = Encoder(
            s.layers, E, s.heads, s.feedforward, s.dropout, attention_dropout=0.0, prenorm=s.prenorm, ops=ops
        )
        self.extra = _extra(s, ops) if s.extra_feedforward else None
        self.mask = nn.Parameter(torch.randn(E)) if s.masking else None  # stands for a masked word
        self.output = None if s.tied else nn.Linear(E, vocabulary, bias=False)
        if s.tied:
            nn.init.normal_(self.embedding.weight, std=E**-0.5)
        self._linear, self._linear_cross_entropy = ops.linear, ops.linear_cross_entropy

    def encode(self, context, masked=None):
        """context: (B, L) int64    masked: (B, L) bool, words that are not to be seen, or None    returns (B, L, E)"""
        x = self.embedding(context)
        if masked is not None:
            x = torch.where(masked[..., None], self.mask, x)
        y = self.encoder(self.positions(x))
        return y if self.extra is None else self.extra(y)

    def pool(self, x):
        """(B, L, E) -> (B, E)"""
        return POOLING[self.settings.pooling](x)

    def forward(self, context):
        """context: (B, L) int64    returns (B, E)"""
        return self.pool(self.encode(context))

    @property
    def output_weight(self):
        return self.embedding.weight if self.output is None else self.output.weight

    def logits(self, y):
        """(..., E) -> (..., V)"""
        return self._linear(y, self.output_weight)

    def cross_entropy(self, y, target, reduction="mean", **details):
        """y: (..., E)    target: (...,) int64, -100 where there is none    returns nats, a scalar, or (...,) with "none"
        details: return_details, of the operator"""
        return self._linear_cross_entropy(y, self.output_weight, target, reduction=reduction, **details)

    def objective(self, context, target):
        """What training minimises; context: (B, L), target: (B,) int64.

        returns (objective, loss): with `masking` the objective is loss, the cross-entropy of the middle words, plus that of the
        masked ones (Devlin et al., 2019); else they are the same
        """
        s = self.settings
        if not (self.training and s.masking):
            loss = self.cross_entropy(self(context), target)
            return loss, loss
        masked = (torch.rand(context.shape, device=context.device) < s.masking) & (context != PADDING)
        x = self.encode(context, masked)
        loss = self.cross_entropy(self.pool(x), target)
        return loss + self.cross_entropy(x, torch.where(masked, context, -100)), loss


def _extra(s, ops):
    return nn.Sequential(
        ResidualLayerNorm(s.embedding, ops=ops),
        FeedForward(s.embedding, s.feedforward, s.dropout, ops=ops),
        ResidualLayerNorm(s.embedding, ops=ops),
    )
