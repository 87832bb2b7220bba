"""`fusedseq vectors RUN`: a trained model's word vectors, as a file or by their neighbours; and those of a file, to begin with."""

from pathlib import Path

import torch

from fusedseq.data.vocabulary import Vocabulary
from fusedseq.data.word2vec import read_word2vec, write_word2vec
from fusedseq.tasks.restored import checkpoint_file
from fusedseq.tasks.training import CheckpointError, load_checkpoint

WEIGHT = "embedding.weight"


def add_arguments(parser):
    parser.add_argument("run", type=Path, metavar="RUN", help="a run's directory, or a checkpoint, of words or ptb")
    parser.add_argument("--out", type=Path, metavar="FILE",
                        help="write them in word2vec's format: binary where FILE ends in .bin, else text; with .gz compressed")  # fmt: skip
    parser.add_argument("--near", nargs="+", metavar="WORD", help="print the words nearest to these, by cosine")
    parser.add_argument("--top", type=int, default=10, help="how many of them (default: %(default)s)")


def run(args):
    if args.out is None and not args.near:
        raise ValueError("nothing to do: give --out FILE, --near WORD, or both")
    if args.top < 1:
        raise ValueError(f"--top must be at least 1, got {args.top}")
    vocabulary, weight = trained(args.run)
    for word in args.near or ():
        near = nearest(word, vocabulary, weight, args.top)
        print(f"{word}: " + ", ".join(f"{other} {cosine:.3f}" for other, cosine in near))
    if args.out is not None:
        write_word2vec(args.out, vocabulary.words, weight)
        print(f"written: {len(weight):,} vectors of {weight.size(1)} numbers in {args.out}")


def trained(path):
    """The Vocabulary of a run or checkpoint of words or ptb, and the vectors of its words, (V, E)."""
    state = load_checkpoint(checkpoint_file(path))
    words = state["description"]["vocabulary"]
    if WEIGHT not in state["model"] or not isinstance(words, list):
        raise CheckpointError(
            f"{path} must hold a model with one embedding of words, got one of {state['description']['task']}"
        )
    return Vocabulary(words), state["model"][WEIGHT]


def nearest(word, vocabulary, weight, top=10):
    """The other words of most cosine with a word: (word, cosine) each, the nearest first. weight: (V, E)"""
    if word not in vocabulary.ids:
        raise ValueError(f"{word!r} is not among the {len(vocabulary):,} words")
    number = vocabulary.ids[word]
    cosines = torch.cosine_similarity(weight, weight[number, None])  # (V,)
    cosines[number] = -torch.inf
    best = cosines.topk(min(top, len(vocabulary) - 1))
    return [
        (vocabulary.words[i], cosine) for i, cosine in zip(best.indices.tolist(), best.values.tolist(), strict=True)
    ]


def begin_with_vectors(weight, path, vocabulary):
    """Puts the vectors of a word2vec file into an embedding's weight, (V, E), and returns how many words have one.

    A word without a vector keeps its random one, scaled to the mean square of those in the file: longer, it would drown
    them. path: as for `read_word2vec`, which names what is wrong with the file; ValueError too where its vectors are not of E
    """
    if not path:
        raise ValueError("data.vectors must be a file of word vectors, word2vec's: --set data.vectors=FILE")
    vectors, found = read_word2vec(Path(path), vocabulary)
    if vectors.size(1) != weight.size(1):
        raise ValueError(f"data.vectors: {path} must have vectors of model.embedding = {weight.size(1)} numbers, "
                         f"got {vectors.size(1)}")  # fmt: skip
    with torch.no_grad():
        scale = vectors[found].square().mean().sqrt() / weight.square().mean().sqrt()
        weight.copy_(torch.where(found[:, None], vectors, weight * scale))
    return int(found.sum())
