"""`fusedseq translate CHECKPOINT`: translates lines of text."""

import argparse
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import fields
from itertools import islice
from pathlib import Path
from typing import Any

from fusedseq.data import compressed
from fusedseq.data.escapes import escaped
from fusedseq.data.parallel import UNKNOWN
from fusedseq.tasks.commands.arguments import (
    add_device_argument,
    add_operators_argument,
    named_file,
    named_options,
    usable_device,
)
from fusedseq.tasks.runs.restore import restored
from fusedseq.tasks.translation.search import Search, longest_sentence, search_all
from fusedseq.tasks.translation.task import SOURCES, languages

# Batches that are read before the first one is translated, so that lines of similar length can be
# put into one batch.
BATCHES = 32


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of the command."""
    add = parser.add_argument
    add(
        "checkpoint",
        type=Path,
        help="a run's directory (its best.safetensors), or a checkpoint, of en-es or en-fr",
    )
    add(
        "--in",
        type=Path,
        metavar="FILE",
        dest="input",
        help="text with a sentence per line, plain or .gz (default: the standard input)",
    )
    add(
        "--beam",
        type=int,
        default=Search.beam,
        help="hypotheses per sentence; 1 is greedy (default: %(default)s)",
    )
    add(
        "--length-penalty",
        type=float,
        default=Search.length_penalty,
        metavar="ALPHA",
        help="0 ranks by log-probability, more prefers longer translations (default: %(default)s)",
    )
    add(
        "--n-best",
        type=int,
        metavar="N",
        help="write the N best translations of each line as number, score and translation, "
        "separated by tabs (default: only the best translation)",
    )
    add(
        "--batch",
        type=int,
        default=Search.batch,
        help="sentences in a batch (default: %(default)s)",
    )
    add(
        "--max-length",
        type=int,
        metavar="WORDS",
        help="limit of a translation (default: twice the source's words and 10 more, but no more "
        "than the longest sentence of the training has)",
    )
    add_operators_argument(parser)
    add_device_argument(parser)


def run(args: argparse.Namespace) -> None:
    """Runs the command."""
    with named_options(field.name for field in fields(Search)):
        _run(args)


def _run(args: argparse.Namespace) -> None:
    n_best = 1 if args.n_best is None else args.n_best
    search = Search(args.beam, args.length_penalty, n_best, args.batch, args.max_length)
    model, description = restored(
        args.checkpoint, tuple(SOURCES), ops=args.ops, device=usable_device(args.device)
    )
    translator = Lines(model, description, search)
    lines = opened(args.input)
    # On a terminal each line is translated as soon as it is entered.
    interactive = args.input is None and sys.stdin.isatty()
    chunk = 1 if interactive else BATCHES * args.batch
    count = 0
    while part := list(islice(lines, chunk)):
        for number, hypotheses in enumerate(translator(part, count + 1), count + 1):
            if args.n_best is None:
                print(escaped(hypotheses[0][1]))
                continue
            for score, text in hypotheses:
                print(f"{number}\t{score:.6f}\t{escaped(text)}")
        sys.stdout.flush()
        count += len(part)
    if translator.unknown:
        print(
            f"fusedseq translate: {translator.unknown:,} of {translator.words:,} words are not in "
            "the vocabulary",
            file=sys.stderr,
        )


def opened(path: Path | None) -> Iterator[str]:
    """The lines of a UTF-8 file, or of the standard input; only \\n ends a line.

    Errors: ValueError that names the line which is not UTF-8
    """
    if path is None:
        # Without a buffer, as in a test, the standard input consists of text already.
        yield from decoded(getattr(sys.stdin, "buffer", None) or sys.stdin, "the standard input")
        return
    try:
        with named_file("--in"):
            file = compressed.opened(path)
        with file:
            yield from decoded(file, str(path))
    except compressed.DAMAGE as error:
        raise ValueError(f"{path} is not readable text: {error}") from None


def decoded(file: Iterable[Any], name: str) -> Iterator[str]:
    """The lines of a file of bytes as text. name: of the file, for the message"""
    for number, line in enumerate(file, 1):
        if isinstance(line, str):
            yield line
            continue
        try:
            yield line.decode("utf-8-sig" if number == 1 else "utf-8")
        except UnicodeDecodeError as error:
            raise ValueError(
                f"{name}, line {number}: byte {error.start + 1} is not UTF-8 ({error.reason})"
            ) from None


class Lines:
    """Translates lines of text.

    A call returns for each line its hypotheses (score, text), the best first, with words joined by
    blanks; for an empty line the text is empty. `words` and `unknown` count the words so far, and
    those that are not in the vocabulary.
    model: a Translator in eval mode    description: of its checkpoint
    """

    def __init__(self, model: Any, description: dict, search: Search) -> None:
        self.model, self.search = model, search
        self.source, self.target = languages(description)
        self.longest = longest_sentence(model, description["settings"]["data"]["max_length"])
        self.words = self.unknown = 0

    def __call__(self, lines: Sequence[str], first: int) -> list[list[tuple[float, str]]]:
        """first: the number of the first line, for messages"""
        words = [self.source.tokenize(line.strip()) for line in lines]
        full = [i for i, sentence in enumerate(words) if sentence]
        for i in full:
            if len(words[i]) > self.longest - 2:
                print(
                    f"fusedseq translate: line {first + i} has {len(words[i])} words, of which "
                    f"only the first {self.longest - 2} are translated: the model was trained on "
                    "no longer sentences",
                    file=sys.stderr,
                )
        sources = [self.source.encode(words[i], self.longest) for i in full]
        self.words += sum(len(ids) - 2 for ids in sources)  # without the start and the end
        self.unknown += sum(ids.count(UNKNOWN) for ids in sources)
        found = search_all(self.model, sources, self.longest, self.search)
        results = [[(0.0, "")] for _ in lines]
        for i, hypotheses in zip(full, found, strict=True):
            results[i] = [(h.score, " ".join(self.target.decode(h.ids))) for h in hypotheses]
        return results
