"""en-fr/base, trained for some hundred steps on generated text.

Random weights would translate every sentence into one word repeated up to the longest length. After
these steps the translations have the lengths of sentences, and the model prefers one word clearly,
so that rounding seldom decides. The weights are stored in build/, which is not tracked.
"""

import itertools
import sys
import time
from pathlib import Path

import torch
from fusedseq.data.parallel import PairBatches
from fusedseq.models.translator import Translator
from fusedseq.tasks.en_fr import PRESETS

from bench.peers import generated_pairs

STORED = Path(__file__).parents[2] / "build/bench"
TRAIN, TEST = 8000, 128  # lines
SEED = 0


def train(model, pairs, steps, *, batch=32, lr=5e-4, warmup=100, seed=SEED):
    """Trains a Translator on Pairs with Adam; returns the loss of the last step in nats."""
    torch.manual_seed(seed)
    model.train()
    optimizer = torch.optim.Adam(model.parameters(), lr=lr)
    batches = (b for epoch in itertools.count() for b in PairBatches(pairs, batch, f"{epoch}"))
    loss = torch.tensor(float("nan"))
    for step, b in enumerate(itertools.islice(batches, steps)):
        optimizer.param_groups[0]["lr"] = lr * min(1.0, (step + 1) / warmup)
        decoded = model(b.source, b.source_lengths, b.target[:, :-1])
        loss = model.cross_entropy(decoded, b.target[:, 1:])
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    model.eval()
    return loss.item()


def load(steps, folder=STORED, settings=PRESETS["base"].model):
    """Returns the model in eval mode, its languages, and the English words of the test lines.

    It is trained if `folder` does not have it from an earlier run.
    settings: of the model
    """
    training, test = (generated_pairs.lines(n, s) for n, s in ((TRAIN, "train"), (TEST, "test")))
    languages = generated_pairs.languages(training)
    torch.manual_seed(SEED)
    sizes = (len(language.vocabulary) for language in languages)
    model = Translator(*sizes, settings)
    path = folder / f"en-fr-base-generated-{steps}-steps.pt"
    if path.is_file():
        model.load_state_dict(torch.load(path, weights_only=True))
    else:
        print(f"training en-fr/base for {steps} steps: ", end="", file=sys.stderr, flush=True)
        start = time.perf_counter()
        loss = train(model, generated_pairs.encoded(training, languages), steps)
        elapsed = time.perf_counter() - start
        print(f"loss {loss:.2f} nats, {elapsed:.0f} s", file=sys.stderr, flush=True)
        path.parent.mkdir(parents=True, exist_ok=True)
        torch.save(model.state_dict(), path)
    return model.eval(), languages, [source for source, _ in test]
