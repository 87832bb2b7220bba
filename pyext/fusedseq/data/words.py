"""Contexts for word prediction in two domains: general text to learn from, and news."""

import random
import zlib
from dataclasses import dataclass

from fusedseq.data import synthetic_domains
from fusedseq.data.catalan_text import sentences
from fusedseq.data.contexts import Contexts
from fusedseq.data.locate import directories, read_lines
from fusedseq.data.statistics import Side
from fusedseq.data.vocabulary import Vocabulary

SPECIALS = ("<pad>", "<unk>")
FOLDERS = ("catalan",)
DOMAINS = ("general", "news")
SPLITS = ("train", "valid", "test", "news_train", "news_valid", "news_test")


@dataclass(frozen=True)
class Domains:
    """Contexts of both domains, and the vocabulary of the general training split. The words of news_train serve
    adaptation: its contexts are read, its targets only where a variant fine-tunes on them."""

    vocabulary: Vocabulary
    train: Contexts
    valid: Contexts
    test: Contexts
    news_train: Contexts
    news_valid: Contexts
    news_test: Contexts
    lines: dict  # for each split its lines, lists of words

    def sides(self):
        return [Side("both domains", self.vocabulary, self.lines)]

    def fingerprint(self):
        crc = zlib.crc32("\n".join(self.vocabulary.words).encode())
        for split in SPLITS:
            crc = zlib.crc32(getattr(self, split).stream.numpy().tobytes(), crc)
        return crc


def load(data=None, *, seed=0, held_out=0.05, limit=100_000, min_frequency=2, radius=3, lower=False):
    """The Domains in `data` (a directory, or 'synthetic'): all of its files general*.txt and news*.txt, plain or .gz,
    one sentence or paragraph a line.

    A line that repeats an earlier one is dropped (general comes first), so that none is in two splits. The rest is split
    at random, for some files are in alphabetical order.
    seed: of the split (and of the synthetic lines)    held_out: the share of a domain's lines in valid, and in test
    limit, min_frequency: of the vocabulary. With a min_frequency of 1 the Catalan texts' 90,771 words would all be in it, and
        <unk>, which is 2.8% of the news, would never be seen in training; with 2 it is 1.5% of the training text, and the
        vocabulary has 51,456 words    radius: context words to either side    lower: in lower case
    """
    if not 0 < held_out < 0.5:
        raise ValueError(f"held_out must be between 0 and 0.5, got {held_out}")
    if data == "synthetic":
        texts = {domain: [iter(lines)] for domain, lines in synthetic_domains.lines(seed).items()}
    else:
        texts = {domain: [read_lines(path) for path in paths] for domain, paths in find(data).items()}
    splits: dict = {}
    seen: set = set()
    for domain, prefix in zip(DOMAINS, ("", "news_"), strict=True):
        distinct = [words for text in texts[domain] for words in sentences(text, lower) if not repeated(words, seen)]
        for split, lines in split_lines(distinct, f"{seed}/{domain}", held_out).items():
            if not any(len(line) > 1 for line in lines):
                raise ValueError(
                    f"words: {prefix}{split} must have a line of 2 words, got {len(lines)} lines, none such"
                )
            splits[prefix + split] = lines
    vocabulary = Vocabulary.count((w for line in splits["train"] for w in line), SPECIALS, min_frequency, limit)
    ids = vocabulary.ids
    contexts = (Contexts.of(([ids.get(w, ids["<unk>"]) for w in line] for line in splits[split]), radius)
                for split in SPLITS)  # fmt: skip
    return Domains(vocabulary, *contexts, lines=splits)


def find(data):
    """For each domain its files, in alphabetical order, from the first directory that has both."""
    looked = []
    for directory in directories("words", data, FOLDERS):
        files = {domain: sorted([*directory.glob(f"{domain}*.txt"), *directory.glob(f"{domain}*.txt.gz")])
                 for domain in DOMAINS}  # fmt: skip
        if all(files.values()):
            return files
        looked.append(f"{directory}/{{{','.join(f'{d}*.txt' for d in DOMAINS)}}}[.gz]")
    raise FileNotFoundError(f"words: data files not found, looked for {' and '.join(looked)}")


def repeated(words, seen):
    """Whether the line is in `seen`, where it is after this."""
    line = " ".join(words)
    before = line in seen
    seen.add(line)
    return before


def split_lines(lines, key, held_out):
    random.Random(key).shuffle(lines)
    each = round(len(lines) * held_out)
    return {"train": lines[2 * each :], "valid": lines[:each], "test": lines[each : 2 * each]}
