"""The reversal of a sequence by the encoder of a Transformer: every position predicts one symbol of the reversed sequence."""

from dataclasses import dataclass

from torch import nn

from fusedseq import fused
from fusedseq.models.transformer_layers import Encoder
from fusedseq.nn import Embedding, SinusoidalPositions


@dataclass(frozen=True)
class ReversalSettings:
    """What a reversal model is made of; the defaults are row reverse/base."""

    embedding: int = 512  # E
    heads: int = 8
    layers: int = 1
    feedforward: int = 2048
    dropout: float = 0.1  # of what attention and feed-forward add, and nowhere else
    mask: bool = False  # padded keys are not seen
    train_padding: bool = True  # padded positions have a target too, the padding
    scale: str = "embedding"  # of attention's logits, 1/sqrt(E) as the document prints; or "head": 1/sqrt(E / heads)


class Reversal(nn.Module):
    """Embedding + sinusoids -> post-norm encoder layers -> linear; logits of attention are scaled by 1/sqrt(E), whatever the
    number of heads, as in the document, or with `settings.scale` "head" as everywhere else.

    vocabulary: V, with the padding, 0    settings: a ReversalSettings    ops: an operator set
    """

    def __init__(self, vocabulary, settings, *, ops=fused):
        super().__init__()
        if settings.scale not in ("embedding", "head"):
            raise ValueError(f"Reversal: scale must be embedding or head, got {settings.scale!r}")
        s = self.settings = settings
        self.embedding = Embedding(vocabulary, s.embedding, ops=ops)
        self.positions = SinusoidalPositions(s.embedding, batch_first=True, ops=ops)
        self.encoder = Encoder(
            s.layers, s.embedding, s.heads, s.feedforward, s.dropout, attention_dropout=0.0, feed_forward_dropout=0.0,
            scale=s.embedding**-0.5 if s.scale == "embedding" else None, ops=ops,
        )  # fmt: skip
        self.output = nn.Linear(s.embedding, vocabulary)
        self._linear, self._linear_cross_entropy = ops.linear, ops.linear_cross_entropy

    def forward(self, ids, lengths=None):
        """ids: (B, L) int64    lengths: (B,) int64, needed with `mask`    returns (B, L, E)"""
        if self.settings.mask and lengths is None:
            raise ValueError("Reversal: lengths must be (B,) with mask, got None")
        return self.encoder(self.positions(self.embedding(ids)), lengths if self.settings.mask else None)

    def logits(self, y):
        """(B, L, E) -> (B, L, V)"""
        return self._linear(y, self.output.weight, self.output.bias)

    def cross_entropy(self, y, targets, reduction="mean", **details):
        """y: (B, L, E)    targets: (B, L) int64, padding 0    returns nats, a scalar, or (B, L) with "none"
        details: return_details, of the operator"""
        ignored = -100 if self.settings.train_padding else 0
        return self._linear_cross_entropy(
            y, self.output.weight, targets, self.output.bias, ignore_index=ignored, reduction=reduction, **details
        )
