"""Speeds up an existing model of torch in one line, and undoes it.

The model stays the same object with the same parameters, so optimizers and checkpoints go on
working.
"""

import copy

import fusedseq
import torch
from torch import nn

torch.manual_seed(0)
V, E, B, L = 5_000, 64, 8, 20  # words, width, batch, length


class LanguageModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(V, E)
        layer = nn.TransformerEncoderLayer(E, 4, 4 * E, dropout=0.0, batch_first=True)
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.decoder = nn.Linear(E, V)

    def forward(self, ids):
        mask = nn.Transformer.generate_square_subsequent_mask(ids.size(1))
        return self.decoder(self.layers(self.embedding(ids), mask, is_causal=True))


def train(model, words, steps=3):
    """Returns the loss of each step."""
    optimizer, losses = torch.optim.SGD(model.parameters(), 0.1), []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = criterion(model(words[:, :-1]).flatten(0, 1), words[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


model, criterion = LanguageModel(), nn.CrossEntropyLoss()
words = torch.randint(V, (B, L))
expected = train(copy.deepcopy(model), words)

report = fusedseq.accelerate(model, loss=criterion, output="decoder")
print(report)
losses = train(model, words)
print("losses:", [round(loss, 4) for loss in losses])
torch.testing.assert_close(losses, expected, rtol=1e-4, atol=0)
report.undo()
print(f"after undo the output layer is a {type(model.decoder).__module__}.Linear again")
