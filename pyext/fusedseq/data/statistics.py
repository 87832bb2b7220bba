"""Statistics of a corpus: sentences, their lengths, frequent words, and unknown words."""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import NamedTuple, Self

from fusedseq.data.vocabulary import Vocabulary


class Side(NamedTuple):
    """A corpus, or one language of a parallel corpus."""

    name: str
    vocabulary: Vocabulary
    splits: Mapping[str, Sequence[Sequence[str]]]  # the sentences of each split, lists of words

    def statistics(self) -> dict[str, "Statistics"]:
        """Returns the Statistics of each split."""
        return {
            name: Statistics.of(sentences, self.vocabulary)
            for name, sentences in self.splits.items()
        }


class Statistics(NamedTuple):
    """The statistics of a split."""

    sentences: int
    words: int
    types: int  # distinct words
    shortest: int  # words in the shortest sentence
    mean: float  # words in a sentence
    longest: int
    unknown_types: int  # distinct words that are not in the vocabulary
    unknown_words: int  # their occurrences
    counts: Counter[str]  # of each word

    @classmethod
    def of(cls, sentences: Sequence[Sequence[str]], vocabulary: Vocabulary) -> Self:
        """Computes the statistics of sentences, which are lists of words."""
        lengths = [len(sentence) for sentence in sentences]
        counts = Counter(word for sentence in sentences for word in sentence)
        unknown = {word: n for word, n in counts.items() if word not in vocabulary.ids}
        return cls(
            sentences=len(lengths),
            words=sum(lengths),
            types=len(counts),
            shortest=min(lengths, default=0),
            mean=sum(lengths) / len(lengths) if lengths else 0.0,
            longest=max(lengths, default=0),
            unknown_types=len(unknown),
            unknown_words=sum(unknown.values()),
            counts=counts,
        )
