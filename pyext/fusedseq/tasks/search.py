"""Many sentences through beam search, in batches by length."""

from dataclasses import dataclass

import torch

from fusedseq.data.length_batching import by_length
from fusedseq.data.parallel import END, START, padded
from fusedseq.decoding.beam import beam_search


@dataclass(frozen=True)
class Search:
    """How sentences are translated; see `decoding.beam.beam_search`."""

    beam: int = 4
    length_penalty: float = 0.6
    n_best: int = 1
    batch: int = 32  # sentences
    max_length: int | None = (
        None  # words of a translation; None: 2 S + 10, of a source of S words, and no more than the
    )
    # longest sentence that the model was trained on

    def __post_init__(self):
        for name in ("beam", "n_best", "batch", "max_length"):
            if getattr(self, name) is not None and getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")

    def limit(self, source, longest):
        """The most words after START, END counted, for the ids of a source, START and END among them."""
        return min(2 * (len(source) - 2) + 11, longest - 1) if self.max_length is None else self.max_length + 1


def search_all(model, sources, longest, search):
    """For each source its hypotheses, in the order of the sources.

    model: a Translator in eval mode    sources: lists of ids, START ... END    longest: ids in a sentence it was trained
    on, both counted    search: a Search
    """
    s = model.settings
    if s.positions == "learned" and search.max_length is not None and search.max_length >= s.max_length:
        raise ValueError(
            f"max_length must be at most {s.max_length - 1}, as positions were learned, got {search.max_length}"
        )
    device, found = model.output_bias.device, list(sources)
    for numbers in by_length([len(ids) for ids in sources], search.batch):
        source, lengths = padded([sources[n] for n in numbers])
        limits = torch.tensor([search.limit(sources[n], longest) for n in numbers])
        results = beam_search(
            model, source.to(device), lengths.to(device), start=START, end=END, max_length=limits.to(device),
            beam=search.beam, length_penalty=search.length_penalty, n_best=search.n_best,
        )  # fmt: skip
        for n, hypotheses in zip(numbers, results, strict=True):
            found[n] = hypotheses
    return found
