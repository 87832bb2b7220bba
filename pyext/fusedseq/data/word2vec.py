"""Word vectors in word2vec's files, text or binary (Mikolov et al., 2013), for an embedding to begin with."""

import gzip

import torch


def read_word2vec(path, vocabulary):
    """The vectors of a vocabulary's words.

    path: a pathlib.Path; binary where its name ends in .bin, else text, where the first line "WORDS SIZE" may be missing
        (as in GloVe's files); either may be gzip-compressed, with .gz after the name. The first vector of a word counts
    returns weight: (V, E) float32, zero where the file has no vector, and found: (V,) bool. ValueError names the file
    """
    name, opener = path.name, open
    if path.suffix == ".gz":
        name, opener = path.stem, gzip.open
    try:
        with opener(path, "rb") as file:
            vectors = dict(_pick((_binary if name.endswith(".bin") else _text)(file), vocabulary))
    except (EOFError, gzip.BadGzipFile, ValueError) as error:
        raise ValueError(f"{path} is not a file of word vectors: {error}") from None
    if not vectors:
        raise ValueError(f"{path} has a vector for none of the {len(vocabulary)} words")
    sizes = {len(vector) for vector in vectors.values()}
    if len(sizes) > 1:
        raise ValueError(f"{path} has vectors of different sizes: {sorted(sizes)}")
    weight, found = torch.zeros(len(vocabulary), *sizes), torch.zeros(len(vocabulary), dtype=torch.bool)
    ids = torch.tensor([*vectors])
    weight[ids], found[ids] = torch.stack([*vectors.values()]), True
    return weight, found


def _pick(entries, vocabulary):
    """Of (word, function that reads its vector) the ids of known words and their vectors."""
    seen = set()
    for word, vector in entries:
        number = vocabulary.ids.get(word)
        if number is not None and number not in seen:
            seen.add(number)
            yield number, vector()


def _text(file):
    for line in file:
        word, *numbers = line.decode("utf-8", errors="replace").rstrip().split(" ")
        if len(numbers) > 1:  # not the first line
            yield word, lambda numbers=numbers: torch.tensor([float(number) for number in numbers])


def _binary(file):
    header = file.readline().split()
    if len(header) != 2:
        raise ValueError(f"its first line must be WORDS SIZE, got {b' '.join(header)[:40]!r}")
    words, size = map(int, header)
    for number in range(words):
        word = bytearray()
        while (letter := file.read(1)) != b" ":
            if not letter:
                raise ValueError(f"it must have {words} words, and ends after {number}")
            word += letter.replace(b"\n", b"")  # the C program ends an entry so, gensim does not
        numbers = file.read(4 * size)
        if len(numbers) < 4 * size:
            raise ValueError(f"it must have {words} words, and ends after {number}")
        yield (
            word.decode("utf-8", errors="replace"),
            lambda n=numbers: torch.frombuffer(bytearray(n), dtype=torch.float32),
        )


def write_word2vec(path, words, weight):
    """Writes word vectors as `read_word2vec` reads them; the file's name says in which of the formats.

    path: a pathlib.Path    words: n strings without blanks    weight: (n, E), written as float32; numbers in text are exact
    """
    if len(words) != len(weight):
        raise ValueError(
            f"write_word2vec: weight must have a row for each of the {len(words)} words, got {len(weight)}"
        )
    broken = [word for word in words if not word or any(letter.isspace() for letter in word)]
    if broken:
        raise ValueError(f"write_word2vec: words must be without blanks, got {broken[0]!r}")
    name, opener = (path.stem, gzip.open) if path.suffix == ".gz" else (path.name, open)
    entry = _binary_entry if name.endswith(".bin") else _text_entry
    with opener(path, "wb") as file:
        file.write(f"{len(words)} {weight.size(1)}\n".encode())
        for word, vector in zip(words, weight.detach().to("cpu", torch.float32), strict=True):
            file.write(entry(word, vector))


def _text_entry(word, vector):
    return f"{word} {' '.join(f'{number:.9g}' for number in vector.tolist())}\n".encode()


def _binary_entry(word, vector):
    return word.encode() + b" " + vector.numpy().tobytes() + b"\n"
