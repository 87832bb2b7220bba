"""Recurrent language models.

Plain RNN (Mikolov et al., 2010), GRU and LSTM, AWD-LSTM (Merity et al., 2018) and Mogrifier LSTM
(Melis et al., 2020).
"""

import math
from dataclasses import dataclass, fields
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from fusedseq import fused
from fusedseq.models.settings_check import check_not_negative, check_probabilities, check_sizes
from fusedseq.nn import (
    GRU,
    LSTM,
    RNN,
    Dropout,
    Embedding,
    LockedDropout,
    MogrifierLSTM,
    Operators,
    SplitCrossEntropy,
)
from fusedseq.nn.initialization import reset_in_order
from fusedseq.nn.recurrent_state import OfLayers

State = tuple[OfLayers, ...]  # (h, c), or (h,) of cells without c


@dataclass(frozen=True)
class LanguageModelSettings:
    """The settings of a language model; the defaults are the plain LSTM of ptb/lstm.

    The cells "gru" and "rnn" take the settings in LSTM_ONLY with their defaults alone.
    """

    embedding: int = 650  # the width of the embedding
    hidden: int | tuple[int, ...] = 650  # width of the state, one for all layers or one for each
    layers: int = 3  # recurrent layers
    cell: str = "lstm"  # "lstm", "gru", or "rnn" with tanh units
    rounds: int = 0  # of a Mogrifier LSTM; 0 is an LSTM
    rank: int | None = None  # of a round's weight; None is full rank
    # Whether the input gate is min(i, 1 - f), as in the code of Melis et al. (2020).
    cap_input_gate: bool = False
    # The initial bias of the forget gate; None draws it as torch.nn.LSTM.
    forget_bias: float | None = None
    residual: bool = False  # a layer reads the sum of the outputs of the two layers below it
    output: str = "last"  # the decoder reads the last layer's output, or the "sum" of all layers'
    tied: bool = False  # the decoder's weight is the embedding
    # The ids at which the vocabulary is cut into a head and tails; () is plain cross-entropy.
    splits: tuple[int, ...] = ()
    # The next three dropouts have one mask for all steps; otherwise one for each step.
    locked: bool = True
    input_dropout: float = 0.0  # of the embedded words
    dropout: float = 0.0  # between layers
    output_dropout: float = 0.0  # of what the decoder reads
    embedding_dropout: float = 0.0  # of word types
    weight_drop: float = 0.0  # on W_hh
    state_dropout: float = 0.0  # of the recurrent h, one mask per sequence
    alpha: float = 0.0  # weight of activation regularization
    beta: float = 0.0  # weight of temporal activation regularization
    init_range: float = 0.1  # embedding and decoder are drawn from U(-init_range, init_range)
    # The distribution of the initial weights: "uniform", where recurrent layers draw theirs as the
    # modules do, or "truncated_normal" for all of them: see draw_truncated_normals.
    init: str = "uniform"

    def __post_init__(self) -> None:
        check_sizes(self, "embedding", "hidden", "layers")
        check_probabilities(self, *(f.name for f in fields(self) if "drop" in f.name))
        check_not_negative(self, "alpha", "beta", "init_range")
        if self.cell not in ("lstm", "gru", "rnn"):
            raise ValueError(f"LanguageModel: cell must be lstm, gru or rnn, got {self.cell!r}")
        if self.init not in ("uniform", "truncated_normal"):
            raise ValueError(
                f"LanguageModel: init must be uniform or truncated_normal, got {self.init!r}"
            )
        if self.output not in ("last", "sum"):
            raise ValueError(f"LanguageModel: output must be last or sum, got {self.output!r}")
        if self.cell == "lstm":
            return
        for setting in fields(self):
            value = getattr(self, setting.name)
            if setting.name in LSTM_ONLY and value != setting.default:
                raise ValueError(
                    f"LanguageModel: {setting.name} must be {setting.default} with cell = "
                    f"{self.cell}, got {value}"
                )

    @property
    def output_size(self) -> int:
        """H of the last layer."""
        return self.hidden if isinstance(self.hidden, int) else self.hidden[-1]


LSTM_ONLY = {  # settings that the other cells do not have
    "rounds",
    "rank",
    "cap_input_gate",
    "forget_bias",
    "state_dropout",
    "init",
}

# The variance of a standard normal distribution before truncation at two standard deviations, for
# a variance of 1 after it: as TensorFlow computes it, and as the code of Melis et al. rounds it.
UNTRUNCATED, ROUNDED_UNTRUNCATED = 0.87962566103423978**-2, 1.3


def truncated_normal_(weight: Tensor, n: int, untruncated: float = ROUNDED_UNTRUNCATED) -> None:
    """Draws a weight from a normal distribution of variance untruncated / n, truncated at two
    standard deviations.
    """
    std = math.sqrt(untruncated / n)
    nn.init.trunc_normal_(weight, std=std, a=-2 * std, b=2 * std)


class LanguageModel(nn.Module):
    """Embedding -> dropout -> recurrent layers -> dropout -> linear decoder.

    vocabulary: V    settings: see LanguageModelSettings
    ops: `fusedseq.fused` or `fusedseq.reference`
    Errors: ValueError if the weights are tied and the sizes of embedding and last layer differ, and
        for splits that do not ascend in (0, V).
    """

    def __init__(
        self, vocabulary: int, settings: LanguageModelSettings, *, ops: Operators = fused
    ) -> None:
        super().__init__()
        s = self.settings = settings
        if s.tied and s.output_size != s.embedding:
            raise ValueError(
                f"LanguageModel: tied needs the last hidden size to be embedding = {s.embedding}, "
                f"got {s.output_size}"
            )
        if any(not start < end for start, end in pairwise((0, *s.splits, vocabulary))):
            raise ValueError(
                f"LanguageModel: splits must ascend in (0, V) = (0, {vocabulary}), got {s.splits}"
            )
        dropout = LockedDropout if s.locked else Dropout
        self.embedding = Embedding(vocabulary, s.embedding, dropout=s.embedding_dropout, ops=ops)
        self.input_dropout = dropout(s.input_dropout, ops=ops)
        self.recurrent = self._recurrent(ops)
        self.output_dropout = dropout(s.output_dropout, ops=ops)
        self.decoder_weight = (
            None if s.tied else nn.Parameter(torch.empty(vocabulary, s.output_size))
        )
        self.decoder_bias = nn.Parameter(torch.zeros(vocabulary))
        self._activation_regularization = ops.activation_regularization
        self._linear, self._linear_cross_entropy = ops.linear, ops.linear_cross_entropy
        self.loss = SplitCrossEntropy(s.output_size, s.splits, ops=ops)
        self._draw_by_settings()

    def reset_parameters(self) -> None:
        """Draws all parameters as the constructor does, in its order."""
        reset_in_order((self.embedding, self.recurrent, self.loss))
        nn.init.zeros_(self.decoder_bias)
        self._draw_by_settings()

    def _draw_by_settings(self) -> None:
        s = self.settings
        if s.init == "truncated_normal":
            self.draw_truncated_normals()
            return
        for weight in (self.embedding.weight, self.decoder_weight):
            if weight is not None:
                nn.init.uniform_(weight, -s.init_range, s.init_range)

    @torch.no_grad()
    def draw_truncated_normals(self) -> None:
        """Draws the parameters as the code of Melis et al. (2020), google-deepmind/lamb, does.

        Weights have the variance 1 / n, and are truncated at two standard deviations; n is the
        number of inputs, of the embedding E, and of the gates' bias H. To the bias of the forget
        gate the setting forget_bias is added. The decoder's bias, the rounds' biases and bias_hh,
        which that code does not have, are 0. Low-rank rounds are drawn as in `MogrifierLSTM`.
        """
        s, recurrent = self.settings, self.recurrent
        truncated_normal_(self.embedding.weight, s.embedding, UNTRUNCATED)
        if self.decoder_weight is not None:
            truncated_normal_(self.decoder_weight, s.output_size, UNTRUNCATED)
        nn.init.zeros_(self.decoder_bias)
        for l, (X, H) in enumerate(recurrent.sizes):
            for name, n in (("weight_ih", X), ("weight_hh", H), ("bias_ih", H)):
                truncated_normal_(getattr(recurrent, f"{name}_l{l}"), n)
            getattr(recurrent, f"bias_ih_l{l}")[H : 2 * H] += s.forget_bias or 0.0
            nn.init.zeros_(getattr(recurrent, f"bias_hh_l{l}"))
            for name, n in (("Q", H), ("R", X)):
                if (weight := getattr(recurrent, f"{name}_l{l}", None)) is not None:
                    truncated_normal_(weight, n)

    def _recurrent(self, ops: Operators) -> GRU | LSTM | MogrifierLSTM | RNN:
        s = self.settings
        shared: dict[str, Any] = {
            "dropout": s.dropout,
            "weight_drop": s.weight_drop,
            "residual": s.residual,
            "output": s.output,
            "locked_input": s.locked,
            "ops": ops,
        }
        if s.cell != "lstm":
            return (GRU if s.cell == "gru" else RNN)(s.embedding, s.hidden, s.layers, **shared)
        shared["forget_bias"] = s.forget_bias
        if s.rounds == 0 and not s.state_dropout and not s.cap_input_gate:
            return LSTM(s.embedding, s.hidden, s.layers, **shared)
        return MogrifierLSTM(
            s.embedding,
            s.hidden,
            s.layers,
            rounds=s.rounds,
            rank=s.rank,
            cap_input_gate=s.cap_input_gate,
            state_dropout=s.state_dropout,
            **shared,
        )

    def forward(self, ids: Tensor, state: State | None = None) -> tuple[Tensor, Tensor, State]:
        """Computes the output of the recurrent layers.

        ids: (T, B) int64    state: (h, c) of all layers, or (h,) of a cell without c; zeros by
            default
        returns dropped and raw, (T, B, D) each: the output of the recurrent layers with and without
        output dropout; and the final state
        """
        x = self.input_dropout(self.embedding(ids))  # (T, B, E)
        if self.settings.cell == "lstm":
            raw, final = self.recurrent(x, state)
        else:
            raw, h = self.recurrent(x, None if state is None else state[0])
            final = (h,)
        return self.output_dropout(raw), raw, final

    @property
    def output_weight(self) -> nn.Parameter:
        """The decoder's weight, (V, D). A tied decoder uses the embedding without its dropout."""
        return self.embedding.weight if self.decoder_weight is None else self.decoder_weight

    def logits(self, y: Tensor) -> Tensor:
        """Returns the logits (T, B, V) of outputs y (T, B, D).

        Errors: ValueError for a model with splits.
        """
        if self.settings.splits:
            raise ValueError(
                f"LanguageModel: splits must be () for logits, got {self.settings.splits}; see "
                "loss.log_prob"
            )
        return self._linear(y, self.output_weight, self.decoder_bias)

    def cross_entropy(
        self, y: Tensor, targets: Tensor, reduction: str = "mean", temperature: float = 1.0
    ) -> Tensor:
        """Returns the cross-entropy in nats: a scalar, or (T, B) with reduction "none".

        y: (T, B, D)    targets: (T, B) int64, -100 for a position without a target
        temperature: divides the logits; it must be 1 for a model with splits
        Errors: ValueError for another temperature with splits.
        """
        if temperature == 1.0:
            loss: Tensor = self.loss(y, targets, self.output_weight, self.decoder_bias, reduction)
            return loss
        if self.settings.splits:
            raise ValueError(f"LanguageModel: temperature must be 1 with splits, got {temperature}")
        loss = self._linear_cross_entropy(
            y,
            self.output_weight,
            targets,
            self.decoder_bias,
            temperature=temperature,
            reduction=reduction,
        )
        return loss

    def regularization(self, dropped: Tensor, raw: Tensor) -> Tensor:
        """Returns alpha * AR(dropped) + beta * TAR(raw), a scalar (Merity et al., 2018).

        dropped, raw: (T, B, D), as `forward` returns them
        """
        s = self.settings
        if not s.alpha and not s.beta:
            return raw.new_zeros(())
        return self._activation_regularization(dropped, raw, s.alpha, s.beta)
