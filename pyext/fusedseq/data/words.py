"""Contexts for word prediction in two domains: general text for training, and news."""

import random
import zlib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from fusedseq.data import synthetic_domains
from fusedseq.data.catalan_text import sentences
from fusedseq.data.contexts import Contexts
from fusedseq.data.locate import Incomplete, directories, named_data, not_found, read_lines
from fusedseq.data.statistics import Side
from fusedseq.data.vocabulary import Vocabulary

SPECIALS = ("<pad>", "<unk>")
FOLDERS = ("catalan",)
DOMAINS = ("general", "news")
SPLITS = ("train", "valid", "test", "news_train", "news_valid", "news_test")

Line = list[str]  # the words of a line


@dataclass(frozen=True)
class Domains:
    """Contexts of both domains, and the vocabulary of the general training split.

    The split news_train is for domain adaptation: the contexts are used, and the targets only by
    variants that fine-tune on them.
    """

    vocabulary: Vocabulary
    train: Contexts
    valid: Contexts
    test: Contexts
    news_train: Contexts
    news_valid: Contexts
    news_test: Contexts
    lines: dict[str, list[Line]]  # of each split

    def sides(self) -> list[Side]:
        """Returns the lines of all splits, for the statistics."""
        return [Side("both domains", self.vocabulary, self.lines)]

    def fingerprint(self) -> int:
        """Returns a checksum of words and streams: a run cannot be resumed on other data."""
        crc = zlib.crc32("\n".join(self.vocabulary.words).encode())
        for split in SPLITS:
            crc = zlib.crc32(getattr(self, split).stream.numpy().tobytes(), crc)
        return crc


def load(
    data: str | None = None,
    *,
    seed: int = 0,
    held_out: float = 0.05,
    limit: int | None = 100_000,
    min_frequency: int = 2,
    radius: int = 3,
    lower: bool = False,
) -> Domains:
    """Loads the Domains in `data`, a directory or 'synthetic'; None reads FUSEDSEQ_DATA.

    All files general*.txt and news*.txt are read, plain or .gz, with one sentence or paragraph per
    line. A line that repeats an earlier one is dropped (general comes first), so that no line is in
    two splits. The others are split at random, because some files are in alphabetical order.
    seed: of the split and of the synthetic lines
    held_out: the fraction of a domain's lines in valid, and in test
    limit: the largest size of the vocabulary
    min_frequency: the least frequency of its words. With 1, all 90,771 words of the Catalan texts
        are in the vocabulary, and <unk>, which is 2.8% of the news, never occurs in training; with
        2 it is 1.5% of the training text, and the vocabulary has 51,456 words
    radius: context words on each side    lower: converts the text to lower case
    Errors: FileNotFoundError, see `find`; ValueError for a held_out outside (0, 0.5) and for a
    split without a line of 2 words.
    """
    if not 0 < held_out < 0.5:
        raise ValueError(f"held_out must be between 0 and 0.5, got {held_out}")
    texts = _texts(data, seed)
    with named_data("words", data):
        splits = _split_texts(texts, seed, held_out, lower)
    vocabulary = Vocabulary.count(
        (w for line in splits["train"] for w in line), SPECIALS, min_frequency, limit
    )
    ids = vocabulary.ids
    train, valid, test, news_train, news_valid, news_test = (
        Contexts.of(([ids.get(w, ids["<unk>"]) for w in line] for line in splits[split]), radius)
        for split in SPLITS
    )
    return Domains(vocabulary, train, valid, test, news_train, news_valid, news_test, splits)


def _split_texts(
    texts: dict[str, list[Iterable[str]]], seed: int, held_out: float, lower: bool
) -> dict[str, list[Line]]:
    """Returns the distinct lines of each split. Errors: ValueError for one without words"""
    splits: dict[str, list[Line]] = {}
    seen: set[str] = set()
    for (domain, parts), prefix in zip(texts.items(), ("", "news_"), strict=True):
        distinct = [
            words for part in parts for words in sentences(part, lower) if not repeated(words, seen)
        ]
        for split, lines in split_lines(distinct, f"{seed}/{domain}", held_out).items():
            if not any(len(line) > 1 for line in lines):
                raise ValueError(
                    f"{prefix}{split} must have a line of 2 words, got {len(lines)} lines, none "
                    "such"
                )
            splits[prefix + split] = lines
    return splits


def _texts(data: str | None, seed: int) -> dict[str, list[Iterable[str]]]:
    """Returns the texts of each domain, each an iterable of lines, in the order of DOMAINS."""
    if data == "synthetic":
        lines = synthetic_domains.lines(seed)
        return {domain: [lines[domain]] for domain in DOMAINS}
    files = find(data)
    return {domain: [read_lines(path) for path in files[domain]] for domain in DOMAINS}


def find(data: str | None) -> dict[str, list[Path]]:
    """Returns the files of each domain, in alphabetical order.

    They are those of the first directory that has files of both domains; see `directories`.
    Errors: FileNotFoundError, see `directories` and `not_found`.
    """
    searched: list[str] = []
    incomplete: list[Incomplete] = []
    for directory in directories("words", data, FOLDERS):
        files = {
            domain: sorted(
                [*directory.glob(f"{domain}*.txt"), *directory.glob(f"{domain}*.txt.gz")]
            )
            for domain in DOMAINS
        }
        if all(files.values()):
            return files
        searched.append(f"{directory}/{{{','.join(f'{d}*.txt' for d in DOMAINS)}}}[.gz]")
        present, missing = (
            [f"{domain}*.txt" for domain in DOMAINS if bool(files[domain]) == found]
            for found in (True, False)
        )
        if present:
            incomplete.append(Incomplete(directory, present, missing))
    raise not_found("words", searched, incomplete)


def repeated(words: Line, seen: set[str]) -> bool:
    """Returns whether the line is in `seen`, and adds it."""
    line = " ".join(words)
    before = line in seen
    seen.add(line)
    return before


def split_lines(lines: list[Line], key: str, held_out: float) -> dict[str, list[Line]]:
    """Shuffles the lines in place and splits them into train, valid and test.

    key: of the random order    held_out: the fraction of valid, and of test
    """
    random.Random(key).shuffle(lines)
    size = round(len(lines) * held_out)
    return {"train": lines[2 * size :], "valid": lines[:size], "test": lines[size : 2 * size]}
