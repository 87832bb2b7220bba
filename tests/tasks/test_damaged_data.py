"""Data files that are damaged or made to do harm: each ends in a sentence that names the file."""

import gzip
import random

import pytest
import torch
from fusedseq import cli
from fusedseq.data import compressed
from fusedseq.data.escapes import escaped
from fusedseq.data.locate import read_lines
from fusedseq.data.vocabulary import Vocabulary
from fusedseq.data.word2vec import read_word2vec, write_word2vec

WORDS = ["the", "dog", "sees"]


def test_every_damage_of_a_compressed_text_names_the_file(tmp_path):
    generator = random.Random(0)
    text = "".join(f"{generator.random()} the dog\n" for _ in range(200)).encode()
    whole, path = gzip.compress(text), tmp_path / "train.txt.gz"
    messages = set()
    for at in [*range(30), *range(30, len(whole), 97)]:
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 0xFF]) + whole[at + 1 :])
        try:
            found = "".join(read_lines(path)).encode()
        except ValueError as error:
            messages.add(str(error))
        else:
            assert found == text, at  # the byte had no meaning, e.g. in the time
    assert all(message.startswith(f"{path} is not readable text: ") for message in messages)
    assert any("Error -3" in message for message in messages), messages  # that of zlib.error


def bomb(path, megabytes):
    """A file of about a thousandth of its expanded size."""
    with gzip.open(path, "wb") as file:
        for _ in range(megabytes):
            file.write(b"the dog\n" * (1 << 17))


def test_a_decompression_bomb_is_bounded(tmp_path, monkeypatch):
    monkeypatch.setattr(compressed, "FLOOR", 1 << 20)
    path = tmp_path / "train.txt.gz"
    bomb(path, 3)
    lines = []
    with pytest.raises(ValueError, match=r"train\.txt\.gz .* expands to more than 1,048,576 bytes"):
        lines.extend(read_lines(path))
    assert sum(map(len, lines)) <= compressed.FLOOR
    path = tmp_path / "vectors.txt.gz"
    bomb(path, 3)
    with pytest.raises(ValueError, match=r"vectors\.txt\.gz .* expands to more than"):
        read_word2vec(path, Vocabulary(["other"]))


def test_text_that_repeats_is_read(tmp_path):
    path = tmp_path / "train.txt.gz"
    bomb(path, 3)
    assert sum(map(len, read_lines(path))) == 3 << 20


HEADERS = {
    "a vector of a terabyte": b"3 1000000000000\n",
    "a negative size": b"3 -5\n",
    "no size": b"3 0\n",
    "many words": b"10000000000000000000000000 2\n",
    "long numbers": b"1" * 6000 + b" 2\n",
    "no numbers": b"three two\n",
}


@pytest.mark.parametrize("kind", HEADERS)
def test_an_absurd_first_line_names_the_file(tmp_path, kind):
    path = tmp_path / "vectors.bin"
    path.write_bytes(HEADERS[kind] + b"the " + bytes(100))
    with pytest.raises(ValueError, match=r"vectors\.bin is not a file .*its first line must be"):
        read_word2vec(path, Vocabulary(WORDS))


def test_an_endless_word_names_the_file(tmp_path):
    path = tmp_path / "vectors.bin"
    path.write_bytes(b"3 2\n" + b"x" * 100_000)
    with pytest.raises(ValueError, match=r"vectors\.bin .* word 1 has over 10,000 bytes"):
        read_word2vec(path, Vocabulary(WORDS))


@pytest.mark.parametrize("name", ["vectors.bin.gz", "vectors.txt.gz"])
def test_damaged_compressed_vectors_name_the_file(tmp_path, name):
    torch.manual_seed(0)
    path = tmp_path / name
    write_word2vec(path, WORDS, torch.randn(3, 50))
    whole = path.read_bytes()
    for at in range(30, len(whole) - 8, 11):
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 0xFF]) + whole[at + 1 :])
        with pytest.raises(ValueError, match=name):
            read_word2vec(path, Vocabulary(WORDS))


def test_vectors_that_are_not_finite_name_the_word(tmp_path):
    path = tmp_path / "vectors.txt"
    path.write_text("the 1 2\ndog nan 1\nsees 1e999 1\n")
    with pytest.raises(ValueError, match=r"vectors\.txt must have finite numbers.* 'dog'"):
        read_word2vec(path, Vocabulary(WORDS))


# Control characters.


def test_control_characters_are_escaped_and_other_text_is_not():
    assert escaped("\x1b[31mred\x07\x9b\x7f\ud800") == "\\x1b[31mred\\x07\\x9b\\x7f\\ud800"
    text = "el gat\tés\u00a0a la\u200d llar\n¿qué? 日本 🐈"
    assert escaped(text) == text


def test_words_of_a_text_are_shown_without_escapes(tmp_path, capsys):
    for split in ("train", "valid", "test"):
        (tmp_path / f"{split}.txt").write_text("the \x1b]0;owned\x07 \x1b[2J dog\n" * 5)
    assert cli.main(["data", "ptb", "--data", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    assert "\\x1b[2J" in out
    assert "\x1b" not in out
    assert cli.main(["data", "ptb", "--data", str(tmp_path / "\x1b[2J")]) == 2
    error = capsys.readouterr().err
    assert "\\x1b[2J" in error
    assert "\x1b" not in error
