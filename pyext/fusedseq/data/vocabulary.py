"""Words and their ids."""

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Self

import torch
from torch import Tensor


class Vocabulary:
    """Words and their ids: id 0 is the most frequent word; ties are in order of first appearance.

    The AWD-LSTM code orders words by first appearance. Here they are ordered by frequency, because
    a split softmax requires it.
    Errors: ValueError for a word that occurs twice.
    """

    def __init__(self, words: Iterable[str]) -> None:
        self.words = list(words)
        self.ids = {word: i for i, word in enumerate(self.words)}
        if len(self.ids) != len(self.words):
            raise ValueError(
                f"Vocabulary: words must be distinct, got {len(self.words) - len(self.ids)} twice"
            )

    @classmethod
    def count(
        cls,
        tokens: Iterable[str],
        specials: Sequence[str] = (),
        min_frequency: int = 1,
        limit: int | None = None,
    ) -> Self:
        """Builds the vocabulary of `tokens`.

        specials: words that come first    min_frequency: the least frequency of the other words
        limit: the largest number of words
        Errors: ValueError for a limit that leaves no room beside the special words.
        """
        if limit is not None and limit <= len(specials):
            raise ValueError(
                f"Vocabulary: limit must be over the {len(specials)} special words, got {limit}"
            )
        counts = Counter(tokens)
        for word in specials:
            del counts[word]
        words = [*specials, *(word for word, n in counts.most_common() if n >= min_frequency)]
        return cls(words[:limit])

    def __len__(self) -> int:
        return len(self.words)

    def encode(self, tokens: Sequence[str], unknown: str = "<unk>") -> Tensor:
        """Returns ids as an int64 tensor (n,).

        unknown: the word that replaces words outside the vocabulary, if it is in the vocabulary
        Errors: ValueError for a word outside the vocabulary if `unknown` is not in it either.
        """
        missing = self.ids.get(unknown)
        ids = [self.ids.get(token, missing) for token in tokens]
        if missing is None and None in ids:
            raise ValueError(
                f"Vocabulary: {tokens[ids.index(None)]!r} is not among the {len(self)} words, nor "
                f"is {unknown}"
            )
        return torch.tensor(ids, dtype=torch.int64)

    def decode(self, ids: Iterable[int]) -> list[str]:
        """Returns the words of ids. Errors: ValueError for ids outside [0, V)."""
        ids = list(ids)
        if ids and not 0 <= min(ids) <= max(ids) < len(self):
            wrong = next(i for i in ids if not 0 <= i < len(self))
            raise ValueError(f"Vocabulary: ids must be in [0, {len(self)}), got {wrong}")
        return [self.words[i] for i in ids]
