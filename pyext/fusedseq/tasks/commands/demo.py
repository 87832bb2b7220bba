"""`fusedseq demo`: trains a language model and a translator on generated text, and uses them.

At the end it times five operators. It writes to a temporary directory alone, which is removed.
"""

import argparse
import contextlib
import io
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.nn.functional as F

from fusedseq import fused, nn, reference
from fusedseq.data.corpus import EOS
from fusedseq.decoding.sample import sample
from fusedseq.models.language_model import LanguageModelSettings
from fusedseq.models.translator import TranslatorSettings
from fusedseq.tasks import en_fr, ptb
from fusedseq.tasks.commands.arguments import add_seed_argument
from fusedseq.tasks.training import Trainer, TrainingSettings
from fusedseq.tasks.translation.search import Search, search_all
from fusedseq.tasks.translation.task import PairSettings

POINTS = 8  # validations during a training
WIDTH = 40  # characters of the longest bar
ROUNDS = 7


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of the command."""
    parser.description = (
        "Trains a small Mogrifier LSTM language model and a small translator on generated text, "
        "shows how their losses fall, lets them write and translate a few lines, and times five "
        "operators beside PyTorch. It takes about a minute on two cores, needs no data, and "
        "leaves no file behind."
    )
    add = parser.add_argument
    add(
        "--steps", type=int, default=160, help="training steps of each model (default: %(default)s)"
    )
    add_seed_argument(parser, "equal seeds give equal losses (default: %(default)s)")


def run(args: argparse.Namespace) -> None:
    """Runs the command."""
    if args.steps < 1:
        raise ValueError(f"--steps must be at least 1, got {args.steps}")
    started = time.perf_counter()
    with tempfile.TemporaryDirectory(prefix="fusedseq-demo-") as folder:
        language_model(args.steps, args.seed, Path(folder, "language-model"))
        translator(args.steps, args.seed, Path(folder, "translator"))
    print("\n3. Five operators, forward and backward, in milliseconds\n")
    print(table([times(*row) for row in operators()]))
    print(
        f"\nThat took {time.perf_counter() - started:.0f} seconds. These times are rough: `make "
        "bench` measures with care.\nNext: `fusedseq list` shows what can be trained, and "
        "`fusedseq train ptb --data synthetic` trains without files."
    )


def limits(steps: int, **settings: Any) -> TrainingSettings:
    """The settings of a training of so many steps with POINTS validations."""
    return TrainingSettings(
        epochs=None,
        steps=steps,
        optimizer="adam",
        eval_steps=max(1, steps // POINTS),
        save_steps=None,
        **settings,
    )


def language_model(steps: int, seed: int, out: Path) -> None:
    """Trains a Mogrifier LSTM, and prints sentences that it writes."""
    settings = ptb.Settings(
        LanguageModelSettings(
            embedding=128, hidden=128, layers=2, rounds=5, tied=True, dropout=0.1, weight_drop=0.1
        ),
        ptb.StreamSettings(batch=20, bptt=35),
        limits(steps, lr=0.004, clip=1.0),
    )
    torch.manual_seed(seed)
    task = ptb.build(settings, "synthetic", ops=fused, seed=seed)
    words = len(task.corpus.vocabulary)
    print(f"1. A Mogrifier LSTM language model, on generated sentences of {words} words\n")
    train(task, settings.training, out)
    vocabulary = task.corpus.vocabulary
    ids = sample(
        task.model,
        torch.full((1, 4), vocabulary.ids[EOS]),
        20,
        temperature=0.7,
        generator=torch.Generator().manual_seed(seed),
    )
    print("\nIt writes:")
    for column in ids.T.tolist():
        text = " ".join(vocabulary.words[i] for i in column)
        print(f"   {text.partition(EOS)[0].strip()}")


def translator(steps: int, seed: int, out: Path) -> None:
    """Trains a Transformer, and prints translations of test sentences by beam search."""
    settings = en_fr.Settings(
        TranslatorSettings(embedding=128, heads=4, layers=2, feedforward=256),
        PairSettings(batch=64),
        limits(steps, lr=0.002, clip=1.0),
    )
    torch.manual_seed(seed)
    task = en_fr.build(settings, "synthetic", ops=fused, seed=seed)
    pairs = task.data.test
    print(f"\n2. A Transformer that translates, on {len(task.data.train.text):,} generated pairs\n")
    train(task, settings.training, out)
    found = search_all(task.model, pairs.source[:4], settings.data.max_length, Search())
    print("\nIt translates:")
    for source, right, hypotheses in zip(
        pairs.source_words, pairs.target_words, found, strict=False
    ):
        print(f"   {' '.join(source)}")
        print(f"      ours      {' '.join(task.data.target.decode(hypotheses[0].ids))}")
        print(f"      reference {' '.join(right)}")


def train(task: Any, settings: TrainingSettings, out: Path) -> None:
    """Trains a task and prints a bar for each validation loss; the model is then in eval mode.

    Errors: KeyboardInterrupt after a signal
    """
    first = []

    def show(step: int, loss: float) -> None:
        first.append(loss)
        bar = "█" * max(1, round(WIDTH * min(1.0, loss / first[0])))
        print(f"   step {step:>5}   loss {loss:6.3f}   {bar}", flush=True)

    def on_validation(_: int, metrics: dict[str, Any]) -> None:
        with contextlib.redirect_stdout(terminal):
            show(trainer.step, metrics["loss"])

    trainer = Trainer(task, settings, out, on_validation=on_validation)
    show(0, trainer.validate()["loss"])
    # The trainer's own lines are for runs that are kept.
    terminal = sys.stdout
    with contextlib.redirect_stdout(io.StringIO()):
        why = trainer.fit()
    if why == "interrupted":
        raise KeyboardInterrupt
    trainer.finish()
    task.model.eval()


def operators() -> list[tuple[str, str, Callable, Callable]]:
    """(operator, what it is compared with, fused call, PyTorch call) of five operators.

    A call runs forward and backward.
    """
    T, B, H, V = 35, 20, 256, 10_000
    x = torch.randn(T, B, H, requires_grad=True)
    q, k, v = (torch.randn(512, 8, 6, 32, requires_grad=True) for _ in range(3))
    residual = torch.randn(64 * 90, 512, requires_grad=True)
    added = torch.randn(64 * 90, 512, requires_grad=True)
    scale, shift = torch.ones(512, requires_grad=True), torch.zeros(512, requires_grad=True)
    W, ids = (0.05 * torch.randn(V, H)).requires_grad_(), torch.randint(V, (T, B))
    mogrifier, oracle = (nn.MogrifierLSTM(H, H, rounds=5, ops=o) for o in (fused, reference))
    ours, theirs = nn.LSTM(H, H), torch.nn.LSTM(H, H)

    def of(call: Callable, *leaves: torch.Tensor) -> Callable:
        return lambda: torch.autograd.grad(call().sum(), leaves)

    def recurrent(module: Any) -> Callable:
        return of(lambda: module(x)[0], x, *module.parameters())

    return [
        ("mogrifier_lstm", "its oracle", recurrent(mogrifier), recurrent(oracle)),
        ("lstm", "torch.nn.LSTM", recurrent(ours), recurrent(theirs)),
        (
            "attention",
            "F.scaled_dot_product_attention",
            of(lambda: fused.attention(q, k, v), q, k, v),
            of(lambda: F.scaled_dot_product_attention(q, k, v), q, k, v),
        ),
        (
            "residual_layer_norm",
            "F.layer_norm of x + F.dropout",
            of(
                lambda: fused.residual_layer_norm(added, residual, scale, shift, p=0.1, seed=1),
                added,
                residual,
                scale,
                shift,
            ),
            of(
                lambda: F.layer_norm(residual + F.dropout(added, 0.1), (512,), scale, shift),
                added,
                residual,
                scale,
                shift,
            ),
        ),
        (
            "linear_cross_entropy",
            "F.cross_entropy of F.linear",
            of(lambda: fused.linear_cross_entropy(x, W, ids), x, W),
            of(lambda: F.cross_entropy(F.linear(x, W).view(-1, V), ids.view(-1)), x, W),
        ),
    ]


def times(op: str, name: str, *calls: Callable) -> tuple[str, ...]:
    """A row of the table: medians of interleaved rounds."""
    rounds = [[seconds(call) for call in calls] for _ in range(ROUNDS + 1)]
    ours, theirs = (1e3 * median(column) for column in zip(*rounds[1:], strict=True))
    return op, f"{ours:.2f}", f"{theirs:.2f}", f"{theirs / ours:.1f}×", name


def seconds(call: Callable) -> float:
    """How long a call takes."""
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def table(rows: list[tuple[str, ...]]) -> str:
    """Lines of text with aligned columns."""
    rows = [("operator", "fused", "PyTorch", "faster", "PyTorch is"), *rows]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["   ".join(c.ljust(w) for c, w in zip(row, widths, strict=True)) for row in rows]
    return "\n".join(f"   {line.rstrip()}" for line in lines)
