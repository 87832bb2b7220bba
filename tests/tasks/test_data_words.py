"""The two domains of the word task: tokenization, disjoint splits, and windows within a line."""

import gzip
import random
import re
import time
from dataclasses import replace

import pytest
import torch
from fusedseq.data import PAD, catalan_text, words
from fusedseq.data.contexts import ContextBatches, Contexts
from fusedseq.data.locate import read_lines
from fusedseq.data.vocabulary import Vocabulary

from tests.support.real_data import real

REAL = real("catalan")


def write(directory, general, news):
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "general_a.txt.gz").write_bytes(gzip.compress("\n".join(general).encode()))
    (directory / "news.txt").write_text("\r\n".join(news))
    return str(directory)


def text(name, n):
    return [f"{name} line number {i}" for i in range(n)]


def lines_of(lines, split):
    return [tuple(line) for line in lines[split]]


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("L'aigua, d’un col·legi.", ["L'", "aigua", ",", "d'", "un", "col·legi", "."]),
        ("Fer-ho 3.000 cops", ["Fer", "-", "ho", "3", ".", "000", "cops"]),
        (
            "L{{'}}'''aigua''' és [[bo|bona]] [[tot]]{{sfn X 1991}}",
            ["L'", "aigua", "és", "bona", "tot"],
        ),
        (
            "a [text](http://x.org/a_b) b (www.gnu.org) c@d.cat e <br/> f 1 < 2",
            ["a", "text", "b", "(", ")", "e", "f", "1", "<", "2"],
        ),
        ("car\u00adrer\u200b nou\r\n", ["carrer", "nou"]),
        ("Tom &amp; Joan&nbsp;!", ["Tom", "&", "Joan", "!"]),
        ("  ", []),
    ],
)
def test_catalan_text_is_split_into_words_without_markup(line, expected):
    assert catalan_text.tokenize(line) == expected


def test_addresses_are_removed_as_by_the_plain_pattern():
    plain = re.compile(r"\S+@\S+\.\S+|(?:https?://|www\.)[^\s)\]]+")
    (linear,) = [pattern for pattern, _ in catalan_text.MARKUP if "@" in pattern.pattern]
    generator = random.Random(0)
    parts = ["@", "@", ".", ".", " ", "a", "\t", ")", "www.", "http://"]
    for _ in range(20_000):
        text = "".join(generator.choices(parts, k=generator.randint(0, 12)))
        assert linear.sub("#", text) == plain.sub("#", text), text


@pytest.mark.parametrize("text", ["a", "@", "a@", "a.", "a@b"])
def test_a_long_line_without_blanks_takes_linear_time(text):
    started = time.process_time()
    catalan_text.tokenize(text * (200_000 // len(text)))  # minutes where the time is quadratic
    assert time.process_time() - started < 10


def test_line_numbers_are_removed_from_numbered_files_only():
    assert [*catalan_text.sentences(["00001. A b", "", "00003. C"])] == [["A", "b"], ["C"]]
    assert [*catalan_text.sentences(["Any", "08001. C"])] == [["Any"], ["08001", ".", "C"]]


def test_no_line_is_in_two_splits(tmp_path):
    general, news = (
        text("general", 60) * 2,
        [*text("news", 40), *text("general", 3), "", "news line number 1 \r"],
    )
    loaded = words.load(write(tmp_path, general, news), held_out=0.1)
    lines = [line for split in words.SPLITS for line in lines_of(loaded.lines, split)]
    assert len(lines) == len({*lines}) == 100
    assert [len(loaded.lines[split]) for split in words.SPLITS] == [48, 6, 6, 32, 4, 4]
    assert all(line[0] == "news" for line in lines_of(loaded.lines, "news_train"))


def test_alphabetical_files_are_shuffled(tmp_path):
    loaded = words.load(write(tmp_path, [f"a{i:03d} b" for i in range(200)], text("news", 40)))
    assert lines_of(loaded.lines, "train") != sorted(lines_of(loaded.lines, "train"))


def test_text_is_converted_to_lower_case_where_that_is_asked_for(tmp_path):
    """Lines that differ in their case alone are repetitions then."""
    general = [f"{the} dog number {i}" for i in range(40) for the in ("The", "the")]
    data = write(tmp_path, general, text("News", 40))
    plain, lower = words.load(data), words.load(data, lower=True)
    assert len(plain.train) == 2 * len(lower.train)
    for loaded, expected in ((plain, {"The", "the"}), (lower, {"the"})):
        assert {*loaded.vocabulary.words} & {"The", "the"} == expected
    assert lower.lines["news_test"][0][0] == "news"


def test_the_vocabulary_has_the_general_words_by_frequency(tmp_path):
    general = [f"the {'old ' * (i % 2)}dog x{i}" for i in range(60)]
    loaded = words.load(write(tmp_path, general, text("news", 40)), limit=5, held_out=0.1)
    assert loaded.vocabulary.words[:2] == ["<pad>", "<unk>"]
    assert {*loaded.vocabulary.words[2:4]} == {"the", "dog"}
    assert loaded.vocabulary.words[4] == "old"
    assert (loaded.news_train.targets == 1).all()
    for options in ({}, {"min_frequency": 2}):
        assert len(words.load(str(tmp_path), **options).vocabulary) == 5
    with pytest.raises(ValueError, match="limit must be over the 2 special words, got 2"):
        words.load(str(tmp_path), limit=2)


def test_the_same_seed_gives_the_same_data():
    prints = [words.load("synthetic", seed=seed).fingerprint() for seed in (1, 1, 2)]
    assert prints[0] == prints[1] != prints[2]


def test_the_fingerprint_depends_on_every_split_and_the_words():
    loaded = words.load("synthetic")
    changed = [replace(loaded, vocabulary=Vocabulary(loaded.vocabulary.words[::-1]))]
    for split in words.SPLITS:
        contexts = getattr(loaded, split)
        changed.append(
            replace(loaded, **{split: replace(contexts, stream=contexts.stream.flip(0))})
        )
    assert len({other.fingerprint() for other in (loaded, *changed)}) == 8


def test_the_synthetic_domains_differ():
    loaded = words.load("synthetic")
    (side,) = loaded.sides()
    statistics = side.statistics()
    assert statistics["valid"].unknown_words == 0 < statistics["news_valid"].unknown_words
    frequent = [
        {w for w, _ in statistics[s].counts.most_common(8)} for s in ("train", "test", "news_test")
    ]
    assert len(frequent[0] & frequent[1]) > len(frequent[0] & frequent[2])


def test_files_are_found_and_missing_files_are_named(tmp_path, monkeypatch):
    write(tmp_path / "catalan", text("general", 40), text("news", 40))
    monkeypatch.setenv("FUSEDSEQ_DATA", str(tmp_path))
    assert words.load().fingerprint() == words.load(str(tmp_path / "catalan")).fingerprint()
    (tmp_path / "catalan/news.txt").unlink()
    with pytest.raises(FileNotFoundError, match=r"catalan has general\*.txt, and lacks news\*.txt"):
        words.load()
    for path in (tmp_path / "catalan").iterdir():
        path.unlink()
    with pytest.raises(
        FileNotFoundError, match=r"words: .* looked for .*general\*\.txt,news\*\.txt"
    ):
        words.load()


def test_a_split_without_words_is_rejected(tmp_path):
    with pytest.raises(
        ValueError,
        match=r"words: the data in .*: news_valid must have a line of 2 words, got 0 lines",
    ):
        words.load(write(tmp_path, text("general", 40), ["one line"]))


def test_a_window_does_not_cross_line_ends():
    contexts = Contexts.of([[5, 6, 7, 8, 9], [4], [3, 2]], radius=2)
    assert contexts.targets.tolist() == [5, 6, 7, 8, 9, 3, 2]
    windows = contexts.windows(torch.arange(7))
    assert windows.tolist() == [
        [0, 0, 6, 7],
        [0, 5, 7, 8],
        [5, 6, 8, 9],
        [6, 7, 9, 0],
        [7, 8, 0, 0],
        [0, 0, 2, 0],
        [0, 3, 0, 0],
    ]
    assert windows.dtype == contexts.targets.dtype == torch.int64


def test_every_window_equals_the_plain_definition():
    loaded = words.load("synthetic")
    lines = [loaded.vocabulary.encode(line).tolist() for line in loaded.lines["valid"]]
    expected = [
        ([PAD] * 3 + line + [PAD] * 3)[i : i + 3] + ([*line, PAD, PAD, PAD])[i + 1 : i + 4]
        for line in lines
        for i in range(len(line))
    ]
    assert loaded.valid.windows(torch.arange(len(loaded.valid))).tolist() == expected


def test_windows_with_other_labels_can_be_added():
    one, other = Contexts.of([[1, 2, 3]]), Contexts.of([[4, 5], [6, 7]])
    both = one + other.labelled(torch.tensor([9, 8, 7, 6]))
    assert both.targets.tolist() == [1, 2, 3, 9, 8, 7, 6]
    assert both.windows(torch.arange(7)).tolist() == [
        *one.windows(torch.arange(3)).tolist(),
        *other.windows(torch.arange(4)).tolist(),
    ]
    with pytest.raises(ValueError, match=r"targets must be \(3,\), got \(2,\)"):
        one.labelled(torch.tensor([1, 2]))
    with pytest.raises(ValueError, match="radius must be 3 in both, got 2"):
        one + Contexts.of([[1, 2]], radius=2)


@pytest.mark.parametrize("key", [None, "0/0"])
def test_every_window_is_in_one_batch(key):
    contexts = Contexts.of([[*range(1, 12)], [*range(20, 25)]])
    batches = ContextBatches(contexts, 5, key)
    assert len([*batches]) == len(batches) == 4
    numbers = torch.cat([batch.numbers for batch in batches])
    assert numbers.sort().values.tolist() == [*range(16)]
    assert (numbers.tolist() == [*range(16)]) == (key is None)
    for batch in batches:
        assert torch.equal(batch.context, contexts.windows(batch.numbers))
        assert torch.equal(batch.target, contexts.targets[batch.numbers])
        assert batch.items == len(batch.target)
    assert torch.equal(
        numbers, torch.cat([batch.numbers for batch in ContextBatches(contexts, 5, key)])
    )


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: words.load("synthetic", held_out=0), "held_out must be between 0 and 0.5, got 0"),
        (lambda: words.load("synthetic", radius=0), "radius must be at least 1, got 0"),
        (lambda: ContextBatches(Contexts.of([[1, 2]]), 0), "batch must be at least 1, got 0"),
    ],
)
def test_arguments_out_of_range_are_rejected(call, message):
    with pytest.raises(ValueError, match=message):
        call()


@pytest.mark.skipif(REAL is None, reason="FUSEDSEQ_DATA has no Catalan texts")
def test_line_numbers_are_removed_from_the_real_wikipedia():
    lines = [*catalan_text.sentences(read_lines(REAL / "general_wikipedia_wp20000.txt.gz"))]
    assert len(lines) == 19_994
    assert lines[0][:4] == ["No", "existeix", "avui", "dia"]
    assert sum(line[0].isdigit() and len(line[0]) == 5 for line in lines) < 5
    assert not any("{{" in " ".join(line) or "http" in line for line in lines[:1000])


@pytest.mark.skipif(REAL is None, reason="FUSEDSEQ_DATA has no Catalan texts")
def test_repeated_lines_are_removed_from_the_real_texts(tmp_path):
    for name in ("general_literary_sentences.txt.gz", "news_globalvoices.txt.gz"):
        (tmp_path / name).symlink_to(REAL / name)
    loaded = words.load(str(tmp_path))
    lines = [" ".join(line) for split in words.SPLITS for line in loaded.lines[split]]
    assert len(lines) == len({*lines})
    # According to the README of the data there are 36,374 and 21,342 lines, of which 2,112 and 328
    # repeat an earlier one exactly.
    assert 34_000 < sum(len(loaded.lines[split]) for split in words.SPLITS[:3]) <= 34_262
    assert 20_900 < sum(len(loaded.lines[split]) for split in words.SPLITS[3:]) <= 21_014
