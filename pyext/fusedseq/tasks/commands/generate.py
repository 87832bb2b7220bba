"""`fusedseq generate CHECKPOINT`: samples text from a language model."""

import argparse
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

import torch

from fusedseq.data.corpus import EOS
from fusedseq.data.escapes import escaped
from fusedseq.data.vocabulary import Vocabulary
from fusedseq.decoding.sample import sample
from fusedseq.tasks.catalog import task_operators
from fusedseq.tasks.commands.arguments import (
    add_device_argument,
    add_operators_argument,
    add_seed_argument,
    named_options,
    usable_device,
)
from fusedseq.tasks.runs.restore import restored

UNKNOWN = "<unk>"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of the command."""
    add = parser.add_argument
    add(
        "checkpoint",
        type=Path,
        help="a run's directory (its best.safetensors), or a checkpoint, of ptb",
    )
    add("--prompt", default="", help="the words that the text starts with (default: none)")
    add(
        "--words",
        type=int,
        default=100,
        metavar="N",
        help="words to sample after the prompt (default: %(default)s)",
    )
    add(
        "--temperature",
        type=float,
        default=1.0,
        help="softmax temperature; 0 takes the most probable word (default: %(default)s)",
    )
    add("--top-k", type=int, metavar="K", help="sample from the K most probable words alone")
    add(
        "--top-p",
        type=float,
        metavar="P",
        help="sample from the most probable words whose probabilities sum to P",
    )
    add("--no-unknown", action="store_true", help=f"never sample {UNKNOWN}")
    add(
        "--samples",
        type=int,
        default=1,
        metavar="N",
        help="number of texts, separated by an empty line (default: %(default)s)",
    )
    add_seed_argument(parser, "equal seeds give equal texts (default: %(default)s)")
    add_operators_argument(parser, task_operators("ptb"))
    add_device_argument(parser)


def run(args: argparse.Namespace) -> None:
    """Runs the command."""
    if args.samples < 1:
        raise ValueError(f"--samples must be at least 1, got {args.samples}")
    device = usable_device(args.device)
    model, description = restored(args.checkpoint, ("ptb",), ops=args.ops, device=device)
    vocabulary = Vocabulary(description["vocabulary"])
    prompt = args.prompt.split()
    # The text starts after the end of a sentence.
    ids = torch.tensor([vocabulary.ids[EOS], *encode(prompt, vocabulary)], device=device)
    never = [vocabulary.ids[UNKNOWN]] if args.no_unknown and UNKNOWN in vocabulary.ids else []
    with named_options(("words", "temperature", "top_k", "top_p")):
        sampled = sample(
            model,
            ids[:, None].expand(-1, args.samples),
            args.words,
            temperature=args.temperature,
            top_k=args.top_k,
            top_p=args.top_p,
            never=never,
            generator=torch.Generator(device).manual_seed(args.seed),
        )
    texts = [
        text([*prompt, *(vocabulary.words[i] for i in column)]) for column in sampled.T.tolist()
    ]
    print(escaped("\n\n".join(texts)))


def encode(words: Sequence[str], vocabulary: Vocabulary) -> list[int]:
    """The ids of the prompt; an unknown word becomes <unk>, where the vocabulary has that.

    Errors: ValueError for an unknown word otherwise
    """
    for word in words:
        if word not in vocabulary.ids and UNKNOWN not in vocabulary.ids:
            raise ValueError(f"--prompt must consist of words of the vocabulary, got {word!r}")
        if word not in vocabulary.ids:
            print(
                f"fusedseq generate: {word!r} is not in the vocabulary and is read as {UNKNOWN}",
                file=sys.stderr,
            )
    return [vocabulary.ids[word if word in vocabulary.ids else UNKNOWN] for word in words]


def text(words: Iterable[str]) -> str:
    """Words joined by blanks, with a line per sentence."""
    return "\n".join(line.strip() for line in " ".join(words).removesuffix(EOS).split(EOS))
