"""Corpora as streams: files, vocabulary, columns, segments, and the generated corpus."""

import gzip
import random
import statistics
from dataclasses import replace

import pytest
import torch
from fusedseq.data import corpus, synthetic
from fusedseq.data.batching import IGNORED, Batches, batchify, segments
from fusedseq.data.vocabulary import Vocabulary

from tests.support.real_data import real

SPLITS = ("train", "valid", "test")
PTB = [d for d in (real("."), real("ptb")) if d and (d / "ptb.train.txt.gz").exists()]
WIKITEXT = real("wikitext2")


def write(directory, naming="ptb.{}.txt", text=" the cat sat \n the dog \n"):
    directory.mkdir(parents=True, exist_ok=True)
    for split in SPLITS:
        path = directory / naming.format(split)
        if path.suffix == ".gz":
            path.write_bytes(gzip.compress(text.encode()))
        else:
            path.write_text(text)
    return directory


@pytest.mark.parametrize(
    "naming", ["ptb.{}.txt", "ptb.{}.txt.gz", "{}.txt", "{}.txt.gz", "wiki.{}.tokens"]
)
@pytest.mark.parametrize("inside", [".", "ptb"])
def test_a_directory_is_read_with_each_naming(tmp_path, naming, inside, monkeypatch):
    write(tmp_path / inside, naming)
    monkeypatch.setenv("FUSEDSEQ_DATA", str(tmp_path))
    for loaded in (corpus.load(str(tmp_path)), corpus.load()):
        assert loaded.vocabulary.decode(loaded.train) == [
            "the",
            "cat",
            "sat",
            "<eos>",
            "the",
            "dog",
            "<eos>",
        ]


def test_missing_files_are_named(tmp_path, monkeypatch):
    (write(tmp_path) / "ptb.valid.txt").unlink()
    with pytest.raises(FileNotFoundError, match=r"has .*test\.txt, and lacks ptb\.valid\.txt"):
        corpus.load(str(tmp_path))
    monkeypatch.delenv("FUSEDSEQ_DATA", raising=False)
    with pytest.raises(FileNotFoundError, match="FUSEDSEQ_DATA"):
        corpus.load()


def test_a_truncated_file_is_named(tmp_path):
    whole = (write(tmp_path, "ptb.{}.txt.gz") / "ptb.test.txt.gz").read_bytes()
    (tmp_path / "ptb.test.txt.gz").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ValueError, match=r"ptb\.test\.txt\.gz is not readable"):
        corpus.load(str(tmp_path))


def test_an_empty_file_is_an_error(tmp_path):
    (write(tmp_path) / "ptb.valid.txt").write_text("")
    with pytest.raises(
        ValueError, match=f"ptb: the data in {tmp_path}: valid must have at least 2 tokens, got 0"
    ):
        corpus.load(str(tmp_path))


def test_a_new_word_without_a_word_for_it_is_named(tmp_path):
    (write(tmp_path) / "ptb.test.txt").write_text("the zz")
    with pytest.raises(ValueError, match=f"ptb: the data in {tmp_path}: test must .*'zz' is not"):
        corpus.load(str(tmp_path))


def test_only_ids_of_the_vocabulary_are_decoded():
    vocabulary = Vocabulary(["a", "b"])
    assert vocabulary.decode([]) == []
    assert vocabulary.decode(iter([1, 0])) == ["b", "a"]
    for number in (-1, 2):
        with pytest.raises(ValueError, match=rf"ids must be in \[0, 2\), got {number}"):
            vocabulary.decode([0, number])


def test_vocabulary_is_in_order_of_frequency():
    vocabulary = Vocabulary.count(["b", "a", "c", "a", "b", "a", "<unk>"])
    assert vocabulary.words == ["a", "b", "c", "<unk>"]
    assert vocabulary.decode(vocabulary.encode(["c", "new", "a"])) == ["c", "<unk>", "a"]
    with pytest.raises(ValueError, match="'new' is not among the 1 words"):
        Vocabulary(["a"]).encode(["a", "new"])


@pytest.mark.parametrize("n", [2, 3, 10, 100, 101])
@pytest.mark.parametrize("batch", [1, 3, 10, 200])
def test_every_word_but_the_first_is_a_target_once(n, batch):
    stream = torch.arange(1, n + 1)
    inputs, targets = batchify(stream, batch)
    pairs = [
        (i, t)
        for i, t in zip(inputs.flatten().tolist(), targets.flatten().tolist(), strict=True)
        if t != IGNORED
    ]
    assert sorted(pairs) == list(zip(range(1, n), range(2, n + 1), strict=True))
    # In a column each target is the next input.
    follows = targets[:-1] == inputs[1:]
    assert follows[targets[1:] != IGNORED].all()


@pytest.mark.parametrize(("n", "batch"), [(1, 2), (5, 0)])
def test_batchify_rejects_too_few_columns_or_words(n, batch):
    with pytest.raises(ValueError, match=r"batchify: .* must (be|have) at least"):
        batchify(torch.arange(n), batch)


@pytest.mark.parametrize("rng", [None, 1, 2])
def test_segments_leave_no_gap(rng):
    spans = segments(1000, 70, rng and random.Random(rng))
    assert spans[0][0] == 0
    assert [start + length for start, length in spans] == [start for start, _ in spans[1:]] + [1000]


def test_lengths_have_the_distribution_of_awd_lstm():
    lengths = [length for _, length in segments(70 * 20_000, 70, random.Random(0))[:-1]]
    short = sum(length < 52 for length in lengths) / len(lengths)
    assert short == pytest.approx(0.05, abs=0.01)
    # int() truncates, so the mean is lower by one half.
    assert sum(lengths) / len(lengths) == pytest.approx(0.95 * 70 + 0.05 * 35 - 0.5, abs=0.3)
    usual = [length for length in lengths if length >= 52]
    # Four standard errors; int() adds the variance of a uniform distribution, 1/12.
    error = 4 * 5 / (2 * len(usual)) ** 0.5
    assert statistics.stdev(usual) == pytest.approx((5**2 + 1 / 12) ** 0.5, abs=error)
    assert min(length for _, length in segments(10_000, 6, random.Random(0))[:-1]) == 5


def test_batches_are_determined_by_their_key():
    inputs, targets = batchify(torch.arange(5000), 7)
    spans = [Batches(inputs, targets, 20, key).spans for key in ("0/0", "0/0", "0/1", "1/0")]
    assert spans[0] == spans[1]
    assert spans[0] != spans[2] != spans[3] != spans[0]
    batches = Batches(inputs, targets, 20, "0/0")
    assert sum(b.items for b in batches) == 4999
    assert all(b.lr_scale == len(b.inputs) / 20 for b in batches)
    assert {b.lr_scale for b in Batches(inputs, targets, 20)} == {1.0}


def test_the_same_seed_gives_the_same_synthetic_corpus():
    assert synthetic.sentences() == synthetic.sentences()
    assert synthetic.sentences(seed=1) != synthetic.sentences()
    loaded = corpus.load("synthetic")
    assert len(loaded.vocabulary) == 93
    assert loaded.fingerprint() == corpus.load("synthetic").fingerprint()


def test_the_fingerprint_depends_on_every_split_and_the_words():
    loaded = corpus.load("synthetic")
    changed = [replace(loaded, **{split: getattr(loaded, split).flip(0)}) for split in SPLITS]
    changed.append(replace(loaded, vocabulary=Vocabulary(loaded.vocabulary.words[::-1])))
    assert len({other.fingerprint() for other in (loaded, *changed)}) == 5


def test_synthetic_verbs_agree_with_their_subjects():
    verbs = set(synthetic.VERBS.split())
    nouns = set(synthetic.NOUNS.split())
    for line in synthetic.sentences()["test"]:
        words = line.split()
        if "that" in words:
            continue
        subject = next(
            word for word in words if word in nouns or (word.endswith("s") and word[:-1] in nouns)
        )
        verb = next(
            word for word in words if word in verbs or (word.endswith("s") and word[:-1] in verbs)
        )
        assert (subject not in nouns) == (verb in verbs), line


@pytest.mark.skipif(not PTB, reason="FUSEDSEQ_DATA has no Penn Treebank")
def test_the_real_ptb_has_its_known_statistics():
    loaded = corpus.load(str(PTB[0]))
    assert [len(getattr(loaded, split)) for split in SPLITS] == [929_589, 73_760, 82_430]
    assert len(loaded.vocabulary) == 10_000
    sentences = [
        int((getattr(loaded, split) == loaded.vocabulary.ids["<eos>"]).sum()) for split in SPLITS
    ]
    assert sentences == [42_068, 3_370, 3_761]
    assert int((loaded.train == loaded.vocabulary.ids["<unk>"]).sum()) == 45_020


@pytest.mark.skipif(WIKITEXT is None, reason="FUSEDSEQ_DATA has no WikiText-2")
def test_the_real_wikitext_has_its_known_statistics():
    loaded = corpus.load(str(WIKITEXT))
    assert [len(getattr(loaded, split)) for split in SPLITS] == [2_088_628, 217_646, 245_569]
    assert len(loaded.vocabulary) == 33_278
    assert loaded.vocabulary.ids.keys() >= {"<eos>", "<unk>", "@-@"}
    (side,) = loaded.sides()
    assert [len(side.splits[split]) for split in SPLITS] == [36_718, 3_760, 4_358]
    assert side.statistics()["test"].unknown_words == 0
