"""The recurrent language models: plain RNN (Mikolov et al., 2010) and LSTM, AWD-LSTM (Merity et al., 2018), Mogrifier LSTM
(Melis et al., 2020)."""

from dataclasses import dataclass, fields

import torch
from torch import nn

from fusedseq import fused
from fusedseq.nn import LSTM, Dropout, Embedding, LockedDropout, MogrifierLSTM, SplitCrossEntropy


@dataclass(frozen=True)
class LanguageModelSettings:
    """What a language model is made of; the defaults are the plain LSTM of ptb/lstm."""

    embedding: int = 650  # E
    hidden: int | tuple[int, ...] = 650  # H, one for all layers or one for each
    layers: int = 3
    cell: str = "lstm"  # or "rnn", with none of what is below down to output, and no dropout of weights and states
    rounds: int = 0  # of the Mogrifier; 0 is an LSTM
    rank: int | None = None  # of a round's weight; None is full rank
    cap_input_gate: bool = False
    forget_bias: float | None = None
    residual: bool = False  # a layer reads the sum of the two outputs below it
    output: str = "last"  # layer's output goes on, or the "sum" of all layers'
    tied: bool = False  # the decoder's weight is the embedding
    splits: tuple[int, ...] = ()  # where the vocabulary is cut into a head and tails; none is plain cross-entropy
    locked: bool = True  # the three dropouts below: one mask for all steps, or one for each step
    input_dropout: float = 0.0
    dropout: float = 0.0  # between layers
    output_dropout: float = 0.0
    embedding_dropout: float = 0.0  # of word types
    weight_dropout: float = 0.0  # of W_hh
    state_dropout: float = 0.0  # of the recurrent h, one mask a sequence
    alpha: float = 0.0  # activation regularization
    beta: float = 0.0  # temporal activation regularization
    init_range: float = 0.1  # embedding and decoder are drawn from U(-init_range, init_range)

    def __post_init__(self):
        if self.cell not in ("lstm", "rnn"):
            raise ValueError(f"LanguageModel: cell must be lstm or rnn, got {self.cell!r}")
        if self.cell == "lstm":
            return
        for field in fields(self):
            if field.name in NOT_OF_AN_RNN and getattr(self, field.name) != field.default:
                raise ValueError(f"LanguageModel: {field.name} must be {field.default} with cell = rnn, got "
                                 f"{getattr(self, field.name)}")  # fmt: skip
        if not isinstance(self.hidden, int) or (self.locked and self.dropout):
            raise ValueError("LanguageModel: with cell = rnn hidden must be one number, and dropout between layers not locked, "
                             f"got hidden = {self.hidden}, locked = {self.locked}, dropout = {self.dropout}")  # fmt: skip

    @property
    def output_size(self):
        return self.hidden if isinstance(self.hidden, int) else self.hidden[-1]


NOT_OF_AN_RNN = {
    "rounds", "rank", "cap_input_gate", "forget_bias", "residual", "output", "weight_dropout", "state_dropout",
}  # fmt: skip


class RNN(nn.RNN):
    """torch.nn.RNN, of tanh units, with its state in a tuple, as that of the other recurrent modules.

    There is no operator for it: it is torch's, and so are the random masks between its layers, with both operator sets.
    """

    def forward(self, x, state=None):
        """x: (T, B, X)    state: (h,), h (layers, B, H); zeros by default    returns y (T, B, H), (h,)"""
        y, h = super().forward(x, None if state is None else state[0])
        return y, (h,)


class LanguageModel(nn.Module):
    """Embedding -> dropout -> recurrent layers -> dropout -> linear decoder.

    vocabulary: V    settings: a LanguageModelSettings    ops: `fusedseq.fused` or `fusedseq.reference`
    """

    def __init__(self, vocabulary, settings, *, ops=fused):
        super().__init__()
        s = self.settings = settings
        if s.tied and s.output_size != s.embedding:
            raise ValueError(f"LanguageModel: tied needs the last hidden size to be embedding = {s.embedding}, "
                             f"got {s.output_size}")  # fmt: skip
        drop = LockedDropout if s.locked else Dropout
        self.embedding = Embedding(vocabulary, s.embedding, s.embedding_dropout, ops=ops)
        self.input_dropout = drop(s.input_dropout, ops=ops)
        self.recurrent = self._recurrent(ops)
        self.output_dropout = drop(s.output_dropout, ops=ops)
        self.decoder_weight = None if s.tied else nn.Parameter(torch.empty(vocabulary, s.output_size))
        self.decoder_bias = nn.Parameter(torch.zeros(vocabulary))
        self._activation_regularization = ops.activation_regularization
        self._linear, self._linear_cross_entropy = ops.linear, ops.linear_cross_entropy
        self.loss = SplitCrossEntropy(s.output_size, s.splits, ops=ops)
        for weight in (self.embedding.weight, self.decoder_weight):
            if weight is not None:
                nn.init.uniform_(weight, -s.init_range, s.init_range)

    def _recurrent(self, ops):
        s = self.settings
        if s.cell == "rnn":
            return RNN(s.embedding, s.hidden, s.layers, dropout=s.dropout)
        shared = {
            "dropout": s.dropout, "weight_dropout": s.weight_dropout, "residual": s.residual, "output": s.output,
            "forget_bias": s.forget_bias, "locked": s.locked, "ops": ops,
        }  # fmt: skip
        if s.rounds == 0 and not s.state_dropout and not s.cap_input_gate:
            return LSTM(s.embedding, s.hidden, s.layers, **shared)
        return MogrifierLSTM(
            s.embedding, s.hidden, s.layers, rounds=s.rounds, rank=s.rank, cap_input_gate=s.cap_input_gate,
            state_dropout=s.state_dropout, **shared,
        )  # fmt: skip

    def forward(self, ids, state=None):
        """ids: (T, B)    state: as the recurrent module's, zeros by default

        returns dropped, raw: (T, B, D), the recurrent output after and before its dropout; and the final state
        """
        x = self.input_dropout(self.embedding(ids))  # (T, B, E)
        raw, state = self.recurrent(x, state)
        return self.output_dropout(raw), raw, state

    @property
    def output_weight(self):
        """(V, D); a tied decoder's is the clean embedding, without its dropout."""
        return self.embedding.weight if self.decoder_weight is None else self.decoder_weight

    def logits(self, y):
        """(T, B, D) -> (T, B, V), of a model without splits"""
        if self.settings.splits:
            raise ValueError(
                f"LanguageModel: splits must be none for logits, got {self.settings.splits}; see loss.log_prob"
            )
        return self._linear(y, self.output_weight, self.decoder_bias)

    def cross_entropy(self, y, targets, reduction="mean", temperature=1.0):
        """y: (T, B, D)    targets: (T, B), -100 where there is none    returns nats, a scalar, or (T, B) with "none"
        temperature: of the softmax of a model without splits"""
        if temperature == 1.0:
            return self.loss(y, targets, self.output_weight, self.decoder_bias, reduction)
        if self.settings.splits:
            raise ValueError(f"LanguageModel: temperature must be 1 with splits, got {temperature}")
        return self._linear_cross_entropy(
            y, self.output_weight, targets, self.decoder_bias, temperature=temperature, reduction=reduction
        )

    def regularization(self, dropped, raw):
        """AR on the dropped output, TAR on the raw one, with the weights of the settings; a scalar."""
        s = self.settings
        if not s.alpha and not s.beta:
            return raw.new_zeros(())
        return self._activation_regularization(dropped, raw, s.alpha, s.beta)
