from collections import Counter

import torch


class Vocabulary:
    """Words and their ids: 0 is the most frequent word (ties in order of first appearance).

    Frequency order, and not the order of first appearance of the AWD-LSTM code: a split softmax needs it.
    """

    def __init__(self, words):
        self.words = list(words)
        self.ids = {word: i for i, word in enumerate(self.words)}
        if len(self.ids) != len(self.words):
            raise ValueError(f"Vocabulary: words must be distinct, got {len(self.words) - len(self.ids)} twice")

    @classmethod
    def count(cls, tokens, specials=(), min_frequency=1, limit=None):
        """Of the words in `tokens`, those seen at least `min_frequency` times, `specials` before them; at most `limit`."""
        if limit is not None and limit <= len(specials):
            raise ValueError(f"Vocabulary: limit must be over the {len(specials)} special words, got {limit}")
        counts = Counter(tokens)
        for word in specials:
            del counts[word]
        words = [*specials, *(word for word, n in counts.most_common() if n >= min_frequency)]
        return cls(words[:limit])

    def __len__(self):
        return len(self.words)

    def encode(self, tokens, unknown="<unk>"):
        """Ids as an int64 tensor (n,); a word that is not in the vocabulary becomes `unknown`, where that is in it."""
        missing = self.ids.get(unknown)
        ids = [self.ids.get(token, missing) for token in tokens]
        if missing is None and None in ids:
            raise ValueError(
                f"Vocabulary: {tokens[ids.index(None)]!r} is not among the {len(self)} words, nor is {unknown}"
            )
        return torch.tensor(ids, dtype=torch.int64)

    def decode(self, ids):
        return [self.words[i] for i in ids]
