"""Trains a Mogrifier LSTM (Melis et al., 2020) on the characters of a text file, then writes text.

    python examples/train_mogrifier.py [FILE] [--steps N]

`fusedseq train ptb` trains word-level models with checkpoints, learning-rate schedules and logs.
"""

import argparse
from pathlib import Path

import torch
from fusedseq import fused
from fusedseq import nn as fnn
from torch import nn

parser = argparse.ArgumentParser()
parser.add_argument("file", nargs="?", type=Path, default=Path(__file__).parents[1] / "README.md")
parser.add_argument("--steps", type=int, default=60)
args = parser.parse_args()

text = args.file.read_text(encoding="utf-8")
alphabet = sorted(set(text))
ids = torch.tensor([alphabet.index(character) for character in text])
T, B, width = 40, 16, 96
columns = ids[: len(ids) // B * B].view(B, -1).T  # (time, B): B parts of the text

torch.manual_seed(0)
embedding = fnn.Embedding(len(alphabet), width)
rnn = fnn.MogrifierLSTM(width, width, num_layers=2, rounds=5, dropout=0.1)
decoder = nn.Linear(width, len(alphabet))
parameters = [*embedding.parameters(), *rnn.parameters(), *decoder.parameters()]
optimizer = torch.optim.Adam(parameters, lr=0.003)

for step in range(args.steps):
    start = torch.randint(len(columns) - T, ()).item()
    segment = columns[start : start + T + 1]  # (T + 1, B)
    y, _ = rnn(embedding(segment[:-1]))
    # The decoder and its loss in one operator: the logits (T, B, V) are never in memory.
    loss = fused.linear_cross_entropy(y, decoder.weight, segment[1:], decoder.bias)
    optimizer.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(parameters, 1.0)
    optimizer.step()
    if step % 10 == 0 or step == args.steps - 1:
        print(f"step {step:3}: {loss.item():.3f} nats per character")

rnn.eval()
written, state = [ids[0]], None
with torch.no_grad():
    for _ in range(80):
        y, state = rnn(embedding(written[-1].view(1, 1)), state)
        written.append(torch.multinomial(decoder(y[0, 0]).softmax(-1), 1)[0])
print("".join(alphabet[i] for i in written))
