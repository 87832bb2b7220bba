"""Word vectors in files: text or binary, compressed or not, with and without the first line."""

import gzip
import struct

import pytest
import torch
from fusedseq.data.vocabulary import Vocabulary
from fusedseq.data.word2vec import read_word2vec, write_word2vec

VECTORS = {"cat": [1.0, -2.5, 0.25], "gós": [0.5, 0.0, 3.0], "unused": [9.0, 9.0, 9.0]}
VOCABULARY = Vocabulary(["<unk>", "gós", "new", "cat"])
HEADER = f"{len(VECTORS)} 3\n"


def text(header=HEADER):
    return (
        header + "".join(f"{word} {' '.join(map(str, v))} \n" for word, v in VECTORS.items())
    ).encode()


def binary(end=b"\n"):
    return HEADER.encode() + b"".join(
        w.encode() + b" " + struct.pack("<3f", *v) + end for w, v in VECTORS.items()
    )


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("a.txt", text()),
        ("a.vec", text("")),
        ("a.bin", binary()),
        ("a.bin", binary(b"")),
        ("a.bin.gz", gzip.compress(binary(), mtime=0)),
        ("a.txt.gz", gzip.compress(text(), mtime=0)),
    ],
)
def test_words_of_the_vocabulary_get_their_vectors(tmp_path, name, content):
    (tmp_path / name).write_bytes(content)
    weight, found = read_word2vec(tmp_path / name, VOCABULARY)
    assert found.tolist() == [False, True, False, True]
    assert weight.dtype == torch.float32
    assert weight.tolist() == [[0.0] * 3, VECTORS["gós"], [0.0] * 3, VECTORS["cat"]]


def test_the_first_vector_of_a_word_counts(tmp_path):
    (tmp_path / "a.txt").write_text("cat 1 2\ncat 3 4\n")
    assert read_word2vec(tmp_path / "a.txt", VOCABULARY)[0][3].tolist() == [1, 2]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.bin", binary()[:-8], "must have 3 words, and ends after 2"),
        ("a.bin", b"not a header\n", "first line must be WORDS SIZE"),
        ("a.txt", b"cat one two\n", "not a file of word vectors: could not convert"),
        ("a.txt", b"dog 1 2\n", "a vector for none of the 4 words"),
        ("a.txt", "cat 1 2\ngós 1 2 3\n".encode(), r"vectors of different sizes: \[2, 3\]"),
        ("a.bin.gz", gzip.compress(binary(), mtime=0)[:-20], "not a file of word vectors"),
    ],
)
def test_a_broken_file_is_named(tmp_path, name, content, message):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=message) as raised:
        read_word2vec(tmp_path / name, VOCABULARY)
    assert name in str(raised.value)


@pytest.mark.parametrize("name", ["a.txt", "a.vec.gz", "a.bin", "a.bin.gz"])
def test_reading_inverts_writing(tmp_path, name):
    weight = torch.randn(4, 5, generator=torch.Generator().manual_seed(0))
    write_word2vec(tmp_path / name, VOCABULARY.words, weight)
    read, found = read_word2vec(tmp_path / name, VOCABULARY)
    assert found.all()
    assert torch.equal(read, weight)  # bit for bit, also in text


def test_the_formats_are_those_of_word2vec(tmp_path):
    words, weight = [*VECTORS], torch.tensor([*VECTORS.values()])
    write_word2vec(tmp_path / "a.bin", words, weight)
    assert (tmp_path / "a.bin").read_bytes() == binary()
    write_word2vec(tmp_path / "a.txt", words, weight)
    assert (tmp_path / "a.txt").read_text() == "3 3\ncat 1 -2.5 0.25\ngós 0.5 0 3\nunused 9 9 9\n"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["one"], "weight must have a row for each of the 1 words, got 2"),
        (["one", "of them"], "without blanks, got 'of them'"),
        (["one", ""], "without blanks, got ''"),
    ],
)
def test_words_that_cannot_be_written_are_rejected(tmp_path, words, message):
    with pytest.raises(ValueError, match=message):
        write_word2vec(tmp_path / "a.txt", words, torch.zeros(2, 3))
