"""English-Spanish and English-French data: disjoint splits, defects of real files, and batches."""

import dataclasses
import gzip

import pytest
import torch
from fusedseq.data import PAD, SPLITS, en_es, en_fr, synthetic_pairs
from fusedseq.data.length_batching import by_length, padding
from fusedseq.data.parallel import END, START, UNKNOWN, PairBatches
from fusedseq.data.parallel_files import read_tabbed, without_gaps
from fusedseq.data.vocabulary import Vocabulary

from tests.support.real_data import real

pytest.importorskip("tokenizers")
pytest.importorskip("nltk")

TASKS = {"en-es": en_es, "en-fr": en_fr}
TED = {
    "train": ("Hello .\nThank you.", "Bonjour .\nMerci."),
    "dev": ("One dog.", "Un chien."),
    "test": ("A cat.", "Un chat."),
}


def tatoeba(directory, lines):
    directory.mkdir(exist_ok=True)
    (directory / "spa.txt.gz").write_bytes(gzip.compress("\n".join(lines).encode()))
    return str(directory)


def ted(directory, texts=TED):
    directory.mkdir(exist_ok=True)
    for split, sides in texts.items():
        for side, text in zip(("en", "fr"), sides, strict=True):
            (directory / f"{split}.{side}").write_bytes(
                text.encode()
            )  # the last line has no newline
    return str(directory)


@pytest.fixture(scope="module", params=TASKS)
def corpus(request):
    return TASKS[request.param].load("synthetic")


def test_the_same_seed_gives_the_same_data(corpus):
    load = TASKS[{"Spanish": "en-es", "French": "en-fr"}[corpus.target.name]].load
    assert (
        load("synthetic").fingerprint()
        == corpus.fingerprint()
        != load("synthetic", seed=1).fingerprint()
    )


def test_the_fingerprint_depends_on_every_split_and_side(corpus):
    changed = [corpus]
    for side in ("source", "target"):
        for split in SPLITS:
            pairs = getattr(corpus, split)
            *ids, last = getattr(pairs, side)
            pairs = pairs._replace(**{side: [*ids, [*last, PAD]]})
            changed.append(dataclasses.replace(corpus, **{split: pairs}))
        language = getattr(corpus, side)
        vocabulary = Vocabulary([*language.vocabulary.words, "one more"])
        language = dataclasses.replace(language, vocabulary=vocabulary)
        changed.append(dataclasses.replace(corpus, **{side: language}))
    assert len({other.fingerprint() for other in changed}) == len(changed) == 9


def test_no_pair_is_in_two_splits(corpus):
    train, valid, test = ({*getattr(corpus, split).text} for split in SPLITS)
    assert not train & (valid | test)


def english(pair):
    return " ".join(pair[0].lower().split())


def test_no_english_sentence_of_tatoeba_is_in_two_splits(tmp_path):
    lines = [
        f"{word} {i % 50}.\tuna de {i}" for i in range(300) for word in ("Sentence", "sentence ")
    ]
    loaded = en_es.load(tatoeba(tmp_path, lines), held_out=0.2)
    seen = [{english(pair) for pair in getattr(loaded, split).text} for split in SPLITS]
    assert [len(part) for part in seen] == [30, 10, 10]
    assert len(seen[0] | seen[1] | seen[2]) == 50
    assert sum(len(getattr(loaded, split).text) for split in SPLITS) == 600


def test_the_split_does_not_depend_on_the_order_of_the_file(tmp_path):
    lines = [f"Sentence {i}.\tFrase {i}." for i in range(100)]
    first, second = (
        en_es.load(tatoeba(tmp_path / name, part))
        for name, part in (("a", lines), ("b", lines[::-1]))
    )
    assert {*first.test.text} == {*second.test.text}


def test_further_columns_are_ignored_and_a_line_without_tab_is_rejected(tmp_path):
    pairs = [f"Go {i}.\tVe {i}.\tCC-BY 2.0 (France) Attribution: tatoeba.org" for i in range(20)]
    loaded = en_es.load(tatoeba(tmp_path, [*pairs, "", "Hi.\t"]))
    assert all(
        "CC-BY" not in target for split in SPLITS for _, target in getattr(loaded, split).text
    )
    assert loaded.dropped == {"empty": 1}
    with pytest.raises(
        ValueError,
        match=r"spa\.txt\.gz, line 3: must be two sentences separated by a tab, got 'alone'",
    ):
        en_es.load(tatoeba(tmp_path, [*pairs[:2], "alone"]))


def test_files_that_are_already_split_can_be_read(tmp_path):
    for split, n in (("train", 5), ("valid", 2), ("test", 1)):
        for side in ("en", "es"):
            (tmp_path / f"{split}.{side}").write_text(
                "".join(f"{side} {split} {i}\r\n" for i in range(n))
            )
    loaded = en_es.load(str(tmp_path), min_frequency=1)
    assert [len(getattr(loaded, split).text) for split in SPLITS] == [5, 2, 1]
    assert loaded.train.text[0] == ("en train 0", "es train 0")


def test_ids_are_those_of_the_hugging_face_tokenizer():
    from tokenizers import Tokenizer, models, pre_tokenizers

    loaded = en_es.load("synthetic")
    oracle = Tokenizer(models.WordLevel(loaded.target.vocabulary.ids, unk_token="[UNK]"))
    oracle.pre_tokenizer = pre_tokenizers.Whitespace()
    for text in (*(pair[1] for pair in loaded.test.text[:20]), "¿Qué? No-sé_nada... 3,5"):
        assert loaded.target.encode(loaded.target.tokenize(text)) == [
            START,
            *oracle.encode(text).ids,
            END,
        ]


def test_the_vocabulary_has_the_words_of_train_by_frequency(corpus):
    for side, specials in ((corpus.source, 4), (corpus.target, 4)):
        assert (
            [side.vocabulary.ids[word] for word in side.specials]
            == [PAD, UNKNOWN, START, END]
            == [*range(specials)]
        )
    for side in corpus.sides():
        counts = side.statistics()["train"].counts
        frequencies = [counts[word] for word in side.vocabulary.words[4:]]
        assert frequencies == sorted(frequencies, reverse=True)
        assert frequencies[-1] >= 2


@pytest.mark.parametrize("task", TASKS)
def test_words_that_are_too_rare_are_not_in_the_vocabulary(task):
    sentences, specials = [["a", "b", "a"], ["c", "b", "a"]], [*TASKS[task].SPECIALS]
    for least, words in ((1, ["a", "b", "c"]), (2, ["a", "b"]), (3, ["a"])):
        assert TASKS[task].count(sentences, min_frequency=least).words == specials + words
    assert TASKS[task].count(sentences).words == [*specials, "a", "b"]


def test_decoding_inverts_encoding(corpus):
    language = corpus.target
    words = corpus.test.target_words[0]
    ids = language.encode(words)
    assert language.decode([*ids, PAD, PAD]) == words
    assert language.decode([*ids, ids[1], END]) == words  # nothing after the first END counts
    assert language.decode(language.encode(["never-seen"])) == [language.specials[1]]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (
            "Mr. Smith has 3,000.5 cats, I'm told.",
            ["mr.", "smith", "has", "<NUM>", "cats", ",", "i", "'m", "told", "."],
        ),
        (
            "In the 1990s, 5%. (Applause)",
            ["in", "the", "<NUM>s", ",", "<NUM>", "%", ".", "(", "applause", ")"],
        ),
        ("L'amour est là.", ["l'amour", "est", "là", "."]),
        ("Voici Bill. Je suis Dave.", ["voici", "bill", ".", "je", "suis", "dave", "."]),
        ("", []),
    ],
)
def test_french_and_english_words(text, words):
    assert en_fr.tokenize(text) == words


def test_nltk_needs_no_download(monkeypatch):
    import nltk

    monkeypatch.setattr(nltk.data, "find", lambda *_: pytest.fail("looked for a file"))
    en_fr._tokenizers.cache_clear()
    assert en_fr.tokenize("One. Two.") == ["one", ".", "two", "."]


def test_a_last_line_without_newline_counts(tmp_path):
    loaded = en_fr.load(ted(tmp_path), min_frequency=1)
    assert [len(getattr(loaded, split).text) for split in SPLITS] == [2, 1, 1]
    assert loaded.test.text == [("A cat.", "Un chat.")]


def test_unusable_pairs_are_dropped_from_train_only(tmp_path):
    long, pair = " ".join(["word"] * 600), ("A cat.", "Un chat.")
    rows = [
        ("Fine.", "Bien."),
        (long, "Long."),
        ("Interesting.", "int\ufffdressant."),
        ("", "Vide."),
        pair,
        ("Fine.", "Bien."),
    ]
    texts = {
        "train": ["\n".join(side) for side in zip(*rows, strict=True)],
        "val": (long, long),
        "test": pair,
    }
    loaded = en_fr.load(ted(tmp_path, texts), min_frequency=1)
    assert loaded.train.text == [("Fine.", "Bien.")] * 2
    assert loaded.dropped == {"empty": 1, "broken": 1, "also in valid or test": 1, "too long": 1}
    # A held-out sentence has all words, for the metrics, but its ids are cut off at the limit.
    assert len(loaded.valid.source_words[0]) == 600
    assert len(loaded.valid.source[0]) == 100
    assert loaded.valid.source[0][-1] == END


def test_a_stray_carriage_return_does_not_shift_the_lines(tmp_path):
    texts = TED | {"train": ("One.\nTwo\rparts.\nThree.\r", "Un.\nDeux parties.\nTrois.")}
    assert en_fr.load(ted(tmp_path, texts), min_frequency=1).train.text[2] == ("Three.", "Trois.")


def test_unequal_files_are_rejected(tmp_path):
    with pytest.raises(
        ValueError, match=r"dev\.en and .*dev\.fr must have as many lines, got 2 and 1"
    ):
        en_fr.load(ted(tmp_path, TED | {"dev": ("One.\nTwo.", "Un.")}))


@pytest.mark.parametrize("task", TASKS)
def test_missing_files_are_named(task, tmp_path):
    with pytest.raises(
        FileNotFoundError, match=f"{task}: data files not found, looked for .*train.en"
    ):
        TASKS[task].load(str(tmp_path))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"max_length": 2}, "max_length must be at least 3, got 2"),
        ({"max_length": 3}, "max_length must leave a training pair, got 3"),
        ({"held_out": 0.5}, "held_out must be between 0 and 0.5, got 0.5"),
    ],
)
def test_arguments_out_of_range_are_rejected(arguments, message):
    with pytest.raises(ValueError, match=message):
        en_es.load("synthetic", **arguments)


def test_an_empty_split_is_rejected(tmp_path):
    with pytest.raises(
        ValueError,
        match=f"en-es: the data in {tmp_path}: valid must have at least 1 pair, got 0: "
        "it is 5% of 1 different English sentences",
    ):
        en_es.load(tatoeba(tmp_path, ["Go.\tVe."]))


def test_training_pairs_that_are_all_held_out_are_an_error(tmp_path):
    pair = ("A cat.", "Un chat.")
    with pytest.raises(
        ValueError,
        match=f"en-fr: the data in {tmp_path}: train must have at least 1 pair, got 0 after "
        "dropping 1 also in valid or test",
    ):
        en_fr.load(ted(tmp_path, {"train": pair, "val": pair, "test": pair}))


def test_every_pair_is_in_one_batch_with_padding_at_its_end(corpus):
    batches = PairBatches(corpus.valid, 7, key="0/1")
    numbers = [n for batch in batches for n in batch.pairs]
    assert sorted(numbers) == [*range(len(corpus.valid.text))]
    for batch in batches:
        assert batch.source.dtype == batch.target_lengths.dtype == torch.int64
        for ids, lengths, rows in (
            (batch.source, batch.source_lengths, corpus.valid.source),
            (batch.target, batch.target_lengths, corpus.valid.target),
        ):
            assert ids.shape == (len(batch.pairs), max(lengths))
            for row, length, n in zip(ids, lengths, batch.pairs, strict=True):
                assert row[:length].tolist() == rows[n]
                assert (row[length:] == PAD).all()
        assert batch.items == (batch.target[:, 1:] != PAD).sum()


def test_the_padding_of_each_side_is_that_of_its_batches(corpus):
    batches = PairBatches(corpus.valid, 7)
    for side, found in zip(("source", "target"), batches.padding(), strict=True):
        ids = torch.cat([getattr(batch, side).flatten() for batch in batches])
        assert found == pytest.approx((ids == PAD).double().mean().item())


def test_batches_are_determined_by_their_key(corpus):
    numbers = [
        PairBatches(corpus.train, 32, key).numbers for key in ("0/0", "0/0", "0/1", None, None)
    ]
    assert numbers[0] == numbers[1]
    assert numbers[0] != numbers[2]
    assert numbers[3] == numbers[4]
    lengths = [len(corpus.train.target[n]) for batch in numbers[3] for n in batch]
    assert lengths == sorted(lengths)


def test_the_order_of_batches_and_the_sequences_of_one_length_are_drawn():
    lengths = [1 + i // 10 for i in range(60)]
    first, second = (by_length(lengths, 5, key) for key in ("0", "1"))
    shortest = [lengths[batch[0]] for batch in first]
    assert shortest != sorted(shortest)
    assert {*map(frozenset, first)} != {*map(frozenset, second)}


def test_batches_by_length_have_little_padding():
    lengths = [1 + i * i % 37 for i in range(500)]
    plain = [[*range(start, min(start + 16, 500))] for start in range(0, 500, 16)]
    assert 0 < padding(lengths, by_length(lengths, 16, "0")) < 0.1 * padding(lengths, plain)
    assert padding([3, 3, 1], [[0, 1], [2]]) == 0
    assert padding([1, 3], [[0, 1]]) == pytest.approx(2 / 6)
    with pytest.raises(ValueError, match="by_length: batch must be at least 1, got 0"):
        by_length(lengths, 0)


def test_translations_agree():
    """Articles and adjectives agree with nouns, and adjectives come after them."""
    for source, target in synthetic_pairs.pairs("es", seed=1):
        words = target.rstrip(".").lower().split()
        for i, word in enumerate(words[1:], 1):
            if word in ("casa", "casas"):
                assert (
                    words[i - 1] in {"casa": ("la", "una"), "casas": ("las", "unas")}[word]
                    or words[i - 1].isdigit()
                )
                if words[i + 1 : i + 2] and words[i + 1][:5] == "negr":
                    assert words[i + 1] == ("negra" if word == "casa" else "negras"), (
                        source,
                        target,
                    )
        assert [w for w in source.split() if w.isdigit()] == [
            w for w in target.split() if w.isdigit()
        ]


def test_french_elides():
    targets = [target for _, target in synthetic_pairs.pairs("fr", seed=1)]
    assert any("l'arbre" in target.lower() for target in targets)
    assert not any("le arbre" in target.lower() for target in targets)


@pytest.mark.skipif(not real("tatoeba_en_es"), reason="FUSEDSEQ_DATA has no Tatoeba pairs")
def test_the_real_tatoeba_has_its_known_statistics():
    pairs, empty = without_gaps(read_tabbed(real("tatoeba_en_es") / "spa.txt.gz"))
    splits = en_es.split_by_source(pairs, seed=0, held_out=0.05)
    assert sum(map(len, splits.values())) == len(pairs) == len({*pairs}) == 118_964
    assert empty == 0
    seen = [{english(pair) for pair in splits[split]} for split in SPLITS]
    assert len(seen[0] | seen[1] | seen[2]) == sum(map(len, seen))


@pytest.mark.skipif(not real("ted_en_fr"), reason="FUSEDSEQ_DATA has no TED talks")
def test_the_real_ted_talks_have_their_known_statistics(monkeypatch):
    monkeypatch.setattr(en_fr, "tokenize", str.split)  # NLTK takes ten seconds
    loaded = en_fr.load(str(real("ted_en_fr")), max_length=1000)
    assert [len(getattr(loaded, split).text) for split in SPLITS] == [
        30_000 - sum(loaded.dropped.values()),
        887,
        1305,
    ]
    assert loaded.dropped["broken"] == 1
    assert max(map(len, loaded.train.source_words)) == 609


@pytest.mark.skipif(not real("multi30k_en_fr"), reason="FUSEDSEQ_DATA has no Multi30k")
def test_the_real_multi30k_has_its_known_statistics(monkeypatch):
    monkeypatch.setattr(en_fr, "tokenize", str.split)
    loaded = en_fr.load(str(real("multi30k_en_fr")))
    assert [len(getattr(loaded, split).text) for split in SPLITS] == [
        29_000 - sum(loaded.dropped.values()),
        1014,
        1000,
    ]
