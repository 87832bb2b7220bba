"""Word-level corpora as streams of ids; the Penn Treebank in Mikolov's preprocessing, and WikiText."""

import zlib
from dataclasses import dataclass

from torch import Tensor

from fusedseq.data import SPLITS, synthetic
from fusedseq.data.locate import locate, read_lines
from fusedseq.data.statistics import Side
from fusedseq.data.vocabulary import Vocabulary

EOS = "<eos>"


@dataclass(frozen=True)
class Corpus:
    """Three streams of word ids, each int64 (n,), and the vocabulary of the training stream."""

    vocabulary: Vocabulary
    train: Tensor
    valid: Tensor
    test: Tensor

    @classmethod
    def of(cls, lines):
        """lines: for each split an iterable of lines, words parted by blanks; each line's end is read as <eos>."""
        tokens = {split: [word for line in lines[split] for word in (*line.split(), EOS)] for split in SPLITS}
        vocabulary = Vocabulary.count(tokens["train"])
        for split in SPLITS:
            if len(tokens[split]) < 2:
                raise ValueError(f"corpus: {split} must have at least 2 tokens, got {len(tokens[split])}")
        return cls(vocabulary, *(vocabulary.encode(tokens[split]) for split in SPLITS))

    def sides(self):
        """The sentences without <eos>, for the statistics."""
        return [Side("text", self.vocabulary, {split: self._sentences(getattr(self, split)) for split in SPLITS})]

    def _sentences(self, stream):
        words, ends = self.vocabulary.decode(stream.tolist()), (stream == self.vocabulary.ids[EOS]).nonzero().flatten()
        starts = [0, *(ends + 1).tolist()]
        return [words[start:end] for start, end in zip(starts, ends.tolist(), strict=False)]

    def fingerprint(self):
        """One number for words and streams: a run is not resumed on other data than it began with."""
        crc = zlib.crc32("\n".join(self.vocabulary.words).encode())
        for split in SPLITS:
            crc = zlib.crc32(getattr(self, split).numpy().tobytes(), crc)
        return crc


def load(data=None, *, seed=0):
    """The corpus in `data` (a directory, or 'synthetic'); ptb.train.txt, .valid and .test, or train.txt and so on, or
    wiki.train.tokens and so on (WikiText).
    seed: of the synthetic sentences"""
    if data == "synthetic":
        return Corpus.of(synthetic.sentences(seed))
    names = ("ptb.{}.txt", "{}.txt", "wiki.{}.tokens")
    files = locate("ptb", [[name.format(split) for split in SPLITS] for name in names], data)
    return Corpus.of({split: read_lines(path) for split, path in zip(SPLITS, files, strict=True)})
