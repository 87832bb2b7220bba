"""Word vectors: those of a trained model, and those of a word2vec file as initial embeddings."""

from pathlib import Path

import torch

from fusedseq.data.vocabulary import Vocabulary
from fusedseq.data.word2vec import read_word2vec
from fusedseq.tasks.runs.restore import checkpoint_file, load_run
from fusedseq.tasks.training import CheckpointError

WEIGHT = "embedding.weight"


def trained(path: Path) -> tuple[Vocabulary, torch.Tensor]:
    """The Vocabulary of a run or checkpoint of words or ptb, and its words' vectors, (V, E).

    Errors: CheckpointError where the model has no single embedding of words
    """
    state = load_run(checkpoint_file(path))
    words = state["description"]["vocabulary"]
    if WEIGHT not in state["model"] or not isinstance(words, list):
        raise CheckpointError(
            f"{path} must hold a model with one embedding of words, "
            f"got one of {state['description']['task']}"
        )
    return Vocabulary(words), state["model"][WEIGHT]


def nearest(
    word: str, vocabulary: Vocabulary, weight: torch.Tensor, top: int = 10
) -> list[tuple[str, float]]:
    """The other words with the largest cosine similarity to a word, the nearest first.

    weight: (V, E)    returns (word, cosine) pairs
    Errors: ValueError for a word that is not in the vocabulary
    """
    if word not in vocabulary.ids:
        raise ValueError(f"{word!r} is not among the {len(vocabulary):,} words")
    number = vocabulary.ids[word]
    cosines = torch.cosine_similarity(weight, weight[number, None])  # (V,)
    cosines[number] = -torch.inf
    best = cosines.topk(min(top, len(vocabulary) - 1))
    return [
        (vocabulary.words[i], cosine)
        for i, cosine in zip(best.indices.tolist(), best.values.tolist(), strict=True)
    ]


def load_vectors(weight: torch.Tensor, path: str | Path, vocabulary: Vocabulary) -> int:
    """Copies the vectors of a word2vec file into an embedding; returns how many words have one.

    weight: (V, E), changed in place
    A word without a vector keeps the direction of its random vector, scaled to the mean square of
    the vectors in the file: with larger random vectors these words would dominate.
    Errors: ValueError where the vectors have another size than E, and what `read_word2vec` raises
    """
    if not path:
        raise ValueError(
            "data.vectors must be a file of word vectors in word2vec format: "
            "--set data.vectors=FILE"
        )
    try:
        vectors, found = read_word2vec(Path(path), vocabulary)
    except OSError as error:
        raise ValueError(
            f"data.vectors must be a file of word vectors, got {path}: {error.strerror or error}"
        ) from error
    if vectors.size(1) != weight.size(1):
        raise ValueError(
            f"data.vectors: {path} must have vectors of model.embedding = {weight.size(1)} "
            f"numbers, got {vectors.size(1)}"
        )
    with torch.no_grad():
        scale = vectors[found].square().mean().sqrt() / weight.square().mean().sqrt()
        weight.copy_(torch.where(found[:, None], vectors, weight * scale))
    return int(found.sum())
