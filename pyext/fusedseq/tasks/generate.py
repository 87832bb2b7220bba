"""`fusedseq generate CHECKPOINT`: text from a language model."""

import sys
from pathlib import Path

import torch

from fusedseq.data.corpus import EOS
from fusedseq.data.vocabulary import Vocabulary
from fusedseq.decoding.sample import sample
from fusedseq.tasks.catalog import OPERATORS
from fusedseq.tasks.restored import restored
from fusedseq.tasks.train import add_device_argument, usable_device

UNKNOWN = "<unk>"


def add_arguments(parser):
    add = parser.add_argument
    add("checkpoint", type=Path, help="a run's directory (its best.safetensors), or a checkpoint, of ptb")
    add("--prompt", default="", help="the words that the text begins with (default: none)")
    add("--words", type=int, default=100, metavar="N", help="that are written after them (default: %(default)s)")
    add("--temperature", type=float, default=1.0,
        help="below 1 likely words become likelier; 0 takes the likeliest (default: %(default)s)")  # fmt: skip
    add("--top-k", type=int, metavar="K", help="only the K likeliest words (default: all)")
    add(
        "--top-p",
        type=float,
        metavar="P",
        help="only the likeliest words that have P of the probability together (default: all)",
    )
    add("--no-unknown", action="store_true", help=f"do not write {UNKNOWN}")
    add("--samples", type=int, default=1, metavar="N", help="texts, an empty line between them (default: %(default)s)")
    add("--seed", type=int, default=0, help="one seed, one text (default: %(default)s)")
    add("--ops", choices=OPERATORS, default="fused", help="which operators (default: fused)")
    add_device_argument(parser)


def run(args):
    if args.samples < 1:
        raise ValueError(f"--samples must be at least 1, got {args.samples}")
    device = usable_device(args.device)
    model, description = restored(args.checkpoint, ("ptb",), ops=args.ops, device=device)
    vocabulary = Vocabulary(description["vocabulary"])
    prompt = args.prompt.split()
    ids = torch.tensor([vocabulary.ids[EOS], *read(prompt, vocabulary)], device=device)  # after the end of a sentence
    written = sample(
        model, ids[:, None].expand(-1, args.samples), args.words, temperature=args.temperature, top_k=args.top_k,
        top_p=args.top_p, never=[vocabulary.ids[UNKNOWN]] if args.no_unknown and UNKNOWN in vocabulary.ids else (),
        generator=torch.Generator(device).manual_seed(args.seed),
    )  # fmt: skip
    texts = [text([*prompt, *(vocabulary.words[i] for i in column)]) for column in written.T.tolist()]
    print("\n\n".join(texts))


def read(words, vocabulary):
    """Their ids; an unknown word is read as <unk>, where the model has such a word."""
    for word in words:
        if word not in vocabulary.ids and UNKNOWN not in vocabulary.ids:
            raise ValueError(f"--prompt must be of words that the model knows, got {word!r}")
        if word not in vocabulary.ids:
            print(f"fusedseq generate: the model does not know {word!r} and reads {UNKNOWN}", file=sys.stderr)
    return [vocabulary.ids[word if word in vocabulary.ids else UNKNOWN] for word in words]


def text(words):
    """Words joined by blanks, a line for each sentence."""
    return "\n".join(line.strip() for line in " ".join(words).removesuffix(EOS).split(EOS))
