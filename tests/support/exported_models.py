"""Models for export: a language model, a translator's encoder, and an LSTM with lengths."""

import torch
from fusedseq import nn
from fusedseq.models.language_model import LanguageModel, LanguageModelSettings
from fusedseq.models.translator import Translator, TranslatorSettings
from torch.export import Dim


class Words(torch.nn.Module):
    """ids (T, B) -> logits and the final state."""

    def __init__(self):
        super().__init__()
        settings = LanguageModelSettings(embedding=16, hidden=16, layers=2, tied=True)
        self.model = LanguageModel(50, settings)

    def forward(self, ids):
        y, _, (h, c) = self.model(ids)
        return self.model.logits(y), h, c


class SourceEncoder(torch.nn.Module):
    """source (B, S) and lengths (B,) -> the memory of a translator's decoder."""

    def __init__(self):
        super().__init__()
        settings = TranslatorSettings(embedding=16, heads=2, layers=2, feedforward=32)
        self.model = Translator(30, 30, settings)

    def forward(self, source, lengths):
        return self.model.encode(source, lengths)


class TargetDecoder(torch.nn.Module):
    """target (B, L) and the encoder's memory (B, S, 16) -> the logits of the next words."""

    def __init__(self):
        super().__init__()
        settings = TranslatorSettings(embedding=16, heads=2, layers=2, feedforward=32)
        self.model = Translator(30, 30, settings)

    def forward(self, target, memory):
        return self.model.decode(target, memory)


class Steps(torch.nn.Module):
    """x (T, B, 8) and lengths (B,) -> y and the final state."""

    def __init__(self):
        super().__init__()
        self.lstm = nn.LSTM(8, 6, 2)

    def forward(self, x, lengths):
        y, (h, c) = self.lstm(x, lengths=lengths)
        return y, h, c


T, B, S = (Dim(name, min=2, max=64) for name in ("T", "B", "S"))
# {name: (model, inputs for (length, batch), dynamic dimensions of the inputs)}
MODELS = {
    "language model": (Words, lambda t, b: (torch.randint(50, (t, b)),), ({0: T, 1: B},)),
    "encoder": (
        SourceEncoder,
        lambda t, b: (torch.randint(1, 30, (b, t)), torch.arange(t, t - b, -1)),
        ({0: B, 1: T}, {0: B}),
    ),
    "decoder": (
        TargetDecoder,
        lambda t, b: (torch.randint(1, 30, (b, t)), torch.randn(b, 2 * t + 1, 16)),
        ({0: B, 1: T}, {0: B, 1: S}),
    ),
    "lstm": (
        Steps,
        lambda t, b: (torch.randn(t, b, 8), torch.arange(t, t - b, -1)),
        ({0: T, 1: B}, {0: B}),
    ),
}
