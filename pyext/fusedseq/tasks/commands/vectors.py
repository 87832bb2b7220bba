"""`fusedseq vectors RUN`: a trained model's word vectors, as a file, or the nearest words."""

import argparse
import sys
from pathlib import Path

from fusedseq.data.escapes import escaped
from fusedseq.data.word2vec import write_word2vec
from fusedseq.tasks.adaptation.word_vectors import nearest, trained
from fusedseq.tasks.commands.arguments import named_file
from fusedseq.tasks.training.files import replaced


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of the command."""
    parser.description = (
        "Exports a trained model's word vectors as a word2vec file, or shows the nearest words: "
        "--out or --near is required, and both may be given."
    )
    parser.add_argument(
        "run", type=Path, metavar="RUN", help="a run's directory, or a checkpoint, of words or ptb"
    )
    parser.add_argument(
        "--out",
        type=Path,
        metavar="FILE",
        help="write the vectors in word2vec format: binary if FILE ends in .bin, else text; "
        "compressed if .gz follows",
    )
    parser.add_argument(
        "--near",
        nargs="+",
        metavar="WORD",
        help="print the words nearest to each of these, by cosine similarity",
    )
    parser.add_argument(
        "--top", type=int, default=10, help="how many nearest words (default: %(default)s)"
    )


def run(args: argparse.Namespace) -> int:
    """Runs the command. Returns 0; 2 where no word of --near is known and there is no --out."""
    if args.out is None and not args.near:
        raise ValueError("nothing to do: give --out FILE, --near WORD, or both")
    if args.top < 1:
        raise ValueError(f"--top must be at least 1, got {args.top}")
    vocabulary, weight = trained(args.run)
    known = [word for word in args.near or () if word in vocabulary.ids]
    for word in args.near or ():
        if word not in vocabulary.ids:
            print(
                f"fusedseq vectors: --near: {word!r} is not among the {len(vocabulary):,} words",
                file=sys.stderr,
            )
    for word in known:
        near = nearest(word, vocabulary, weight, args.top)
        text = ", ".join(f"{other} {cosine:.3f}" for other, cosine in near)
        print(escaped(f"{word}: {text}"))
    if args.out is not None:
        with named_file("--out"), replaced(args.out, "wb") as file:
            write_word2vec(args.out, vocabulary.words, weight, file)
        print(f"written: {len(weight):,} vectors of {weight.size(1)} numbers in {args.out}")
    return 0 if known or args.out is not None else 2
