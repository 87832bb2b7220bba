"""Speeds up an existing LSTM language model, in two places.

1. fusedseq.nn.LSTM replaces torch.nn.LSTM. It has the same parameters under the same names, so it
   loads the trained weights and computes the same function.
2. linear_cross_entropy replaces the output layer and its loss, without the logits in memory.
"""

import time

import torch
from fusedseq import fused
from fusedseq import nn as fnn
from torch import nn


class LanguageModel(nn.Module):
    """An ordinary language model, as it might already exist in your code."""

    def __init__(self, vocabulary, width):
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.rnn = nn.LSTM(width, width, num_layers=2)
        self.decoder = nn.Linear(width, vocabulary)

    def forward(self, ids, targets):  # (T, B) each
        y, _ = self.rnn(self.embedding(ids))
        logits = self.decoder(y)  # (T, B, vocabulary)
        return nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


class FasterLanguageModel(LanguageModel):
    """The same model: the same parameters, the same loss."""

    def __init__(self, vocabulary, width):
        super().__init__(vocabulary, width)
        self.rnn = fnn.LSTM(width, width, num_layers=2)

    def forward(self, ids, targets):
        y, _ = self.rnn(self.embedding(ids))
        return fused.linear_cross_entropy(y, self.decoder.weight, targets, self.decoder.bias)


def milliseconds(model, ids, targets, repeats=3):
    """The time of one forward and backward pass."""
    model(ids, targets).backward()  # warm-up
    start = time.perf_counter()
    for _ in range(repeats):
        model(ids, targets).backward()
    return 1000 * (time.perf_counter() - start) / repeats


torch.manual_seed(0)
ids, targets = torch.randint(5000, (2, 35, 20))
model, faster = LanguageModel(5000, 200), FasterLanguageModel(5000, 200)
faster.load_state_dict(model.state_dict())

torch.testing.assert_close(faster(ids, targets), model(ids, targets))
print(f"one step of the original model: {milliseconds(model, ids, targets):.0f} ms")
print(f"one step of the faster model:   {milliseconds(faster, ids, targets):.0f} ms")
