"""Word-level corpora as streams of ids: the Penn Treebank preprocessed by Mikolov, and WikiText."""

import zlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Self

from torch import Tensor

from fusedseq.data import SPLITS, synthetic
from fusedseq.data.locate import locate, named_data, read_lines
from fusedseq.data.statistics import Side
from fusedseq.data.vocabulary import Vocabulary

EOS = "<eos>"  # the end of a line


@dataclass(frozen=True)
class Corpus:
    """Three streams of word ids, int64 (n,) each, and the vocabulary of the training stream."""

    vocabulary: Vocabulary
    train: Tensor
    valid: Tensor
    test: Tensor

    @classmethod
    def of(cls, lines: Mapping[str, Iterable[str]]) -> Self:
        """Builds a corpus from the lines of each split.

        Words are separated by whitespace, and <eos> is added at the end of each line.
        Errors: ValueError for a split of fewer than 2 tokens, and for a word that is not in the
        training split, unless <unk> is.
        """
        tokens = {
            split: [word for line in lines[split] for word in (*line.split(), EOS)]
            for split in SPLITS
        }
        vocabulary = Vocabulary.count(tokens["train"])
        for split in SPLITS:
            if len(tokens[split]) < 2:
                raise ValueError(f"{split} must have at least 2 tokens, got {len(tokens[split])}")
        return cls(vocabulary, *(_encoded(vocabulary, split, tokens[split]) for split in SPLITS))

    def sides(self) -> list[Side]:
        """Returns the sentences without <eos>, for the statistics."""
        splits = {split: self._sentences(getattr(self, split)) for split in SPLITS}
        return [Side("text", self.vocabulary, splits)]

    def _sentences(self, stream: Tensor) -> list[list[str]]:
        words = self.vocabulary.decode(stream.tolist())
        ends = (stream == self.vocabulary.ids[EOS]).nonzero().flatten()
        starts = [0, *(ends + 1).tolist()]
        return [words[start:end] for start, end in zip(starts, ends.tolist(), strict=False)]

    def fingerprint(self) -> int:
        """Returns a checksum of words and streams: a run cannot be resumed on other data."""
        crc = zlib.crc32("\n".join(self.vocabulary.words).encode())
        for split in SPLITS:
            crc = zlib.crc32(getattr(self, split).numpy().tobytes(), crc)
        return crc


def _encoded(vocabulary: Vocabulary, split: str, tokens: list[str]) -> Tensor:
    """Returns the ids of a split. Errors: ValueError, which names the split"""
    try:
        return vocabulary.encode(tokens)
    except ValueError as error:
        raise ValueError(f"{split} must consist of words of the training split: {error}") from None


def load(data: str | None = None, *, seed: int = 0) -> Corpus:
    """Loads the corpus in `data`, a directory or 'synthetic'; None reads FUSEDSEQ_DATA.

    The files are ptb.train.txt, ptb.valid.txt and ptb.test.txt, or train.txt and so on, or
    wiki.train.tokens and so on (WikiText).
    seed: of the synthetic sentences
    Errors: FileNotFoundError, see `locate`; ValueError, which names the data, as `Corpus.of`.
    """
    if data == "synthetic":
        return Corpus.of(synthetic.sentences(seed))
    names = ("ptb.{}.txt", "{}.txt", "wiki.{}.tokens")
    files = locate("ptb", [[name.format(split) for split in SPLITS] for name in names], data)
    lines = {split: read_lines(path) for split, path in zip(SPLITS, files, strict=True)}
    with named_data("ptb", data):
        return Corpus.of(lines)
