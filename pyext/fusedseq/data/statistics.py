"""What a task's document says of its data: sentences, words a sentence, most frequent words, words out of vocabulary."""

from collections import Counter
from typing import NamedTuple

from fusedseq.data.vocabulary import Vocabulary


class Side(NamedTuple):
    """A corpus, or one language of a parallel one."""

    name: str
    vocabulary: Vocabulary
    splits: dict  # name: a list of sentences, each a list of words

    def statistics(self):
        """For each split its Statistics."""
        return {name: Statistics.of(sentences, self.vocabulary) for name, sentences in self.splits.items()}


class Statistics(NamedTuple):
    sentences: int
    words: int
    types: int  # distinct words
    shortest: int  # words in a sentence
    mean: float
    longest: int
    unknown_types: int  # that the vocabulary lacks
    unknown_words: int
    counts: Counter

    @classmethod
    def of(cls, sentences, vocabulary):
        lengths = [len(sentence) for sentence in sentences]
        counts = Counter(word for sentence in sentences for word in sentence)
        unknown = {word: n for word, n in counts.items() if word not in vocabulary.ids}
        mean = sum(lengths) / len(lengths) if lengths else 0.0
        return cls(len(lengths), sum(lengths), len(counts), min(lengths, default=0), mean, max(lengths, default=0),
                   len(unknown), sum(unknown.values()), counts)  # fmt: skip
