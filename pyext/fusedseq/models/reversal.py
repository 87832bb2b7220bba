"""Sequence reversal by a Transformer encoder: each position predicts one symbol of the reversal."""

from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from fusedseq import fused
from fusedseq.models.settings_check import check_heads, check_probabilities, check_sizes
from fusedseq.models.transformer_layers import Encoder
from fusedseq.nn import Embedding, Operators, SinusoidalPositions
from fusedseq.nn.initialization import reset_in_order


@dataclass(frozen=True)
class ReversalSettings:
    """The settings of a reversal model; the defaults are those of reverse/base."""

    embedding: int = 512  # the width of the embedding
    heads: int = 8  # attention heads, a number that divides the width
    layers: int = 1  # encoder layers
    feedforward: int = 2048  # the inner width of the feed-forward part
    dropout: float = 0.1  # of the outputs of attention and feed-forward, and nowhere else
    mask: bool = False  # padded keys are not attended to
    train_padding: bool = True  # padded positions have a target too, the padding symbol
    # The factor of attention's logits: 1/sqrt(E), as in the source report, or with "head"
    # 1/sqrt(E / heads).
    scale: str = "embedding"

    def __post_init__(self) -> None:
        check_sizes(self, "embedding", "heads", "layers", "feedforward")
        check_probabilities(self, "dropout")


class Reversal(nn.Module):
    """Embedding + sinusoidal positions -> post-norm encoder layers -> linear.

    The logits of attention are scaled by 1/sqrt(E) whatever the number of heads, as in the source
    report, or by the usual 1/sqrt(E / heads) if `settings.scale` is "head".

    vocabulary: V, including the padding, id 0    settings: see ReversalSettings
    ops: an operator set
    Errors: ValueError for another scale.
    """

    def __init__(
        self, vocabulary: int, settings: ReversalSettings, *, ops: Operators = fused
    ) -> None:
        super().__init__()
        if settings.scale not in ("embedding", "head"):
            raise ValueError(f"Reversal: scale must be embedding or head, got {settings.scale!r}")
        s = self.settings = settings
        check_heads(s)
        self.embedding = Embedding(vocabulary, s.embedding, ops=ops)
        self.positions = SinusoidalPositions(s.embedding, batch_first=True, ops=ops)
        self.encoder = Encoder(
            s.layers,
            s.embedding,
            s.heads,
            s.feedforward,
            s.dropout,
            attention_dropout=0.0,
            feed_forward_dropout=0.0,
            scale=s.embedding**-0.5 if s.scale == "embedding" else None,
            ops=ops,
        )
        self.output = nn.Linear(s.embedding, vocabulary)
        self._linear, self._linear_cross_entropy = ops.linear, ops.linear_cross_entropy

    def reset_parameters(self) -> None:
        """Draws all parameters as the constructor does, in its order."""
        reset_in_order(self.children())

    def forward(self, ids: Tensor, lengths: Tensor | None = None) -> Tensor:
        """Encodes ids (B, L) int64; returns (B, L, E).

        lengths: (B,) int64, required with `settings.mask`
        Errors: ValueError if they are missing.
        """
        if self.settings.mask and lengths is None:
            raise ValueError("Reversal: lengths must be (B,) with mask, got None")
        x = self.positions(self.embedding(ids))
        encoded: Tensor = self.encoder(x, lengths if self.settings.mask else None)
        return encoded

    def logits(self, y: Tensor) -> Tensor:
        """Returns the logits (B, L, V) of y (B, L, E)."""
        return self._linear(y, self.output.weight, self.output.bias)

    def cross_entropy(
        self, y: Tensor, targets: Tensor, reduction: str = "mean", **details: Any
    ) -> Any:
        """Returns the cross-entropy in nats: a scalar, or (B, L) with reduction "none".

        y: (B, L, E)    targets: (B, L) int64, padding 0
        details: return_details of the operator `linear_cross_entropy`, whose results are returned
        """
        ignore_index = -100 if self.settings.train_padding else 0
        return self._linear_cross_entropy(
            y,
            self.output.weight,
            targets,
            self.output.bias,
            ignore_index=ignore_index,
            reduction=reduction,
            **details,
        )
