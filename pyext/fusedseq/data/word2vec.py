"""Word vectors in word2vec's file formats, text or binary (Mikolov et al., 2013)."""

import gzip
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import IO, cast

import torch
from torch import Tensor

from fusedseq.data.compressed import DAMAGE, opened
from fusedseq.data.vocabulary import Vocabulary

# The largest numbers in the first line of a binary file: of words, and of numbers in a vector.
LARGEST = (1_000_000_000, 1_000_000)
LONGEST_WORD = 10_000  # bytes

Entry = tuple[str, Callable[[], Tensor]]  # a word, and a function that reads its vector


def read_word2vec(path: Path, vocabulary: Vocabulary) -> tuple[Tensor, Tensor]:
    """Returns the vectors of a vocabulary's words, and which words have one.

    path: a binary file if its name ends in .bin, otherwise text, in which the first line
        "WORDS SIZE" may be missing (as in GloVe's files). Either may be compressed, with .gz after
        the name. The first vector of a word counts
    returns weight: (V, E) float32, zero for words without a vector in the file; found: (V,) bool
    Errors: ValueError, which names the file, for another format, damage, vectors of different
    sizes, numbers that are not finite, or a file without a vector of any word.
    """
    name = _format_name(path)
    try:
        with opened(path) as file:
            entries = _binary_entries(file) if name.endswith(".bin") else _text_entries(file)
            vectors = dict(_select(entries, vocabulary))
    except (*DAMAGE, ValueError) as error:
        raise ValueError(f"{path} is not a file of word vectors: {error}") from None
    if not vectors:
        raise ValueError(f"{path} has a vector for none of the {len(vocabulary)} words")
    sizes = {len(vector) for vector in vectors.values()}
    if len(sizes) > 1:
        raise ValueError(f"{path} has vectors of different sizes: {sorted(sizes)}")
    weight = torch.zeros(len(vocabulary), *sizes)
    found = torch.zeros(len(vocabulary), dtype=torch.bool)
    ids, rows = torch.tensor([*vectors]), torch.stack([*vectors.values()])
    if not (finite := rows.isfinite().all(1)).all():
        word = vocabulary.words[int(ids[~finite][0])]
        raise ValueError(f"{path} must have finite numbers, got others for {word!r}")
    weight[ids], found[ids] = rows, True
    return weight, found


def _format_name(path: Path) -> str:
    """Returns the file's name without .gz; its ending says which format the file has."""
    return path.stem if path.suffix == ".gz" else path.name


def _select(entries: Iterable[Entry], vocabulary: Vocabulary) -> Iterator[tuple[int, Tensor]]:
    """Yields the id and the vector of each word of the vocabulary that occurs in the entries."""
    seen = set()
    for word, read in entries:
        number = vocabulary.ids.get(word)
        if number is not None and number not in seen:
            seen.add(number)
            yield number, read()


def _text_entries(file: IO[bytes]) -> Iterator[Entry]:
    for line in file:
        word, *numbers = line.decode("utf-8", errors="replace").rstrip().split(" ")
        if len(numbers) > 1:  # otherwise this is the line "WORDS SIZE"
            yield word, partial(_text_vector, numbers)


def _binary_entries(file: IO[bytes]) -> Iterator[Entry]:
    header = file.readline().split()
    if len(header) != 2:
        raise ValueError(f"its first line must be WORDS SIZE, got {b' '.join(header)[:40]!r}")
    words, size = (_count(text, most) for text, most in zip(header, LARGEST, strict=True))
    for number in range(words):
        word = bytearray()
        while (letter := file.read(1)) != b" ":
            if not letter:
                raise ValueError(f"it must have {words} words, and ends after {number}")
            if len(word) > LONGEST_WORD:
                raise ValueError(f"its word {number + 1} has over {LONGEST_WORD:,} bytes")
            word += letter.replace(b"\n", b"")  # the C program writes one after each entry
        numbers = file.read(4 * size)
        if len(numbers) < 4 * size:
            raise ValueError(f"it must have {words} words, and ends after {number}")
        yield word.decode("utf-8", errors="replace"), partial(_binary_vector, numbers)


def _count(text: bytes, most: int) -> int:
    """A number of the first line. Errors: ValueError where it is not one from 1 to `most`"""
    if not text.isdigit() or len(text) > 20 or not 1 <= int(text) <= most:
        raise ValueError(
            f"its first line must be WORDS SIZE with numbers from 1 to {LARGEST[0]:,} and "
            f"{LARGEST[1]:,}, got {text[:40]!r}"
        )
    return int(text)


def _text_vector(numbers: Sequence[str]) -> Tensor:
    return torch.tensor([float(number) for number in numbers])


def _binary_vector(numbers: bytes) -> Tensor:
    return torch.frombuffer(bytearray(numbers), dtype=torch.float32)


def write_word2vec(
    path: Path, words: Sequence[str], weight: Tensor, file: IO[bytes] | None = None
) -> None:
    """Writes word vectors in the format that `read_word2vec` infers from the file's name.

    words: n strings without whitespace
    weight: (n, E), written as float32; the numbers of a text file are exact
    file: an open file that is written in place of the one at `path`, which then only gives the
        format
    Errors: ValueError for other words or another number of rows.
    """
    if len(words) != len(weight):
        raise ValueError(
            f"write_word2vec: weight must have a row for each of the {len(words)} words, got "
            f"{len(weight)}"
        )
    broken = [word for word in words if not word or any(letter.isspace() for letter in word)]
    if broken:
        raise ValueError(f"write_word2vec: words must be without blanks, got {broken[0]!r}")
    compressed = path.suffix == ".gz"
    entry = _binary_entry if _format_name(path).endswith(".bin") else _text_entry
    with ExitStack() as stack:
        out: IO[bytes] = stack.enter_context(open(path, "wb")) if file is None else file
        if compressed:
            made = gzip.GzipFile(filename="", fileobj=out, mode="wb")
            out = cast(IO[bytes], stack.enter_context(made))
        out.write(f"{len(words)} {weight.size(1)}\n".encode())
        for word, vector in zip(words, weight.detach().to("cpu", torch.float32), strict=True):
            out.write(entry(word, vector))


def _text_entry(word: str, vector: Tensor) -> bytes:
    return f"{word} {' '.join(f'{number:.9g}' for number in vector.tolist())}\n".encode()


def _binary_entry(word: str, vector: Tensor) -> bytes:
    return word.encode() + b" " + vector.numpy().tobytes() + b"\n"
