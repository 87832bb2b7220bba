"""Translates many sentences with beam search, in batches of similar length."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from fusedseq.data.length_batching import by_length
from fusedseq.data.parallel import END, START, padded
from fusedseq.decoding.beam import beam_search
from fusedseq.tasks.training.progress import watched

LARGEST = 10_000_000  # the largest number that a setting of Search may have


@dataclass(frozen=True)
class Search:
    """How sentences are translated; see `decoding.beam.beam_search`."""

    beam: int = 4
    length_penalty: float = 0.6
    n_best: int = 1
    # Sentences in a batch.
    batch: int = 32
    # The largest number of words in a translation; None: 2 S + 10 for a source of S words, but no
    # more than the longest sentence that the model was trained on.
    max_length: int | None = None

    def __post_init__(self) -> None:
        for name in ("beam", "n_best", "batch", "max_length"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name} must be at least 1, got {value}")
            if value is not None and value > LARGEST:
                raise ValueError(f"{name} must be at most {LARGEST:,}, got {value:,}")

    def limit(self, source: Sequence[int], longest: int) -> int:
        """The largest number of ids after START, including END.

        source: the ids of the source sentence, with START and END    longest: as in `search_all`
        """
        if self.max_length is None:
            return min(2 * (len(source) - 2) + 11, longest - 1)
        return self.max_length + 1


def longest_sentence(model: Any, longest: int) -> int:
    """The most ids in a sentence that a Translator reads, START and END included.

    longest: the setting data.max_length. Checkpoints exist with fewer learned positions
    """
    s = model.settings
    return min(longest, s.max_length) if s.positions == "learned" else longest


def search_all(
    model: Any,
    sources: Sequence[Sequence[int]],
    longest: int,
    search: Search,
    progress: str | None = None,
) -> list[list]:
    """The hypotheses of each source sentence, in the order of the sources.

    model: a Translator in eval mode    sources: ids of sentences, START ... END
    longest: the most ids in a sentence that the model was trained on, START and END included
    progress: what a progress bar on the terminal is called; None shows none
    Errors: ValueError where search.max_length exceeds the learned positions
    """
    s = model.settings
    limit = search.max_length
    if s.positions == "learned" and limit is not None and limit >= s.max_length:
        raise ValueError(
            f"max_length must be at most {s.max_length - 1}, because the positions are learned, "
            f"got {limit}"
        )
    longest = longest_sentence(model, longest)
    device = model.output_bias.device
    results: list = [None] * len(sources)
    batches = by_length([len(ids) for ids in sources], search.batch)
    for numbers in batches if progress is None else watched(batches, progress):
        source, lengths = padded([sources[n] for n in numbers])
        limits = torch.tensor([search.limit(sources[n], longest) for n in numbers])
        found = beam_search(
            model,
            source.to(device),
            lengths.to(device),
            start=START,
            end=END,
            max_length=limits.to(device),
            beam=search.beam,
            length_penalty=search.length_penalty,
            n_best=search.n_best,
        )
        for n, hypotheses in zip(numbers, found, strict=True):
            results[n] = hypotheses
    return results
