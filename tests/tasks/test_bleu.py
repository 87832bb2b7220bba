"""BLEU in both definitions: the mean over sentences, and over the corpus."""

import math
import warnings

import pytest
from fusedseq.decoding.bleu import corpus_bleu, corpus_chrf, sentence_bleu

pytest.importorskip("nltk")
pytest.importorskip("sacrebleu")
CAT = ["the", "cat", "sat", "on", "the", "mat", "today"]


def papineni(reference, hypothesis, epsilon):
    """Papineni et al. (2002), equations 1 to 3, of one sentence; epsilon replaces a count of 0."""
    logs = 0.0
    for n in range(1, 5):
        grams = [
            [tuple(words[i : i + n]) for i in range(len(words) - n + 1)]
            for words in (reference, hypothesis)
        ]
        matched = sum(min(grams[0].count(gram), grams[1].count(gram)) for gram in {*grams[1]})
        logs += math.log((matched or epsilon) / max(len(grams[1]), 1)) / 4
    return math.exp(logs + min(0.0, 1 - len(reference) / len(hypothesis)))


@pytest.mark.parametrize(
    "text",
    [
        "the cat sat on the mat",
        "the the the cat sat on mat",
        "a dog sat on the sofa today",
        "the cat",
    ],
)
def test_a_sentences_bleu_is_the_papers(text):
    hypothesis = text.split()
    assert sentence_bleu(CAT, hypothesis) == pytest.approx(papineni(CAT, hypothesis, 0.1))


def test_bounds():
    assert sentence_bleu(CAT, CAT) == 1
    assert sentence_bleu(CAT, []) == sentence_bleu(CAT, ["dog"]) == 0


def test_without_smoothing_a_missing_4_gram_is_zero():
    hypothesis = ["the", "cat", "sat", "in", "the", "mat", "today"]
    with warnings.catch_warnings(action="error"):
        assert sentence_bleu(CAT, hypothesis, "method0") < 1e-60
    assert sentence_bleu(CAT, hypothesis) > 0.2
    assert sentence_bleu(CAT, CAT[:6], "method0") == sentence_bleu(
        CAT, CAT[:6]
    )  # no n-gram is missing


def test_an_unknown_smoothing_is_an_error():
    with pytest.raises(ValueError, match="smoothing must be method0 or method1, got 'method9'"):
        sentence_bleu(CAT, CAT, "method9")


def test_corpus_bleu_does_not_tokenize():
    """Words are not split further and case matters, as the signature records."""
    hypotheses = [["l'", "homme", "<NUM>", "."], ["the", "cat", "sat", "on", "the", "mat"]]
    score, signature = corpus_bleu(hypotheses, hypotheses)
    assert score == pytest.approx(100)
    assert "tok:none" in signature
    assert "case:mixed" in signature
    assert "version:" in signature
    assert corpus_bleu([["a", "b", "c", "d", "e."]], [["a", "b", "c", "d", "e", "."]])[0] < 90
    assert corpus_bleu([CAT], [["The", *CAT[1:]]])[0] < 100


def test_corpus_bleu_is_not_the_mean_of_sentences():
    """Counts are summed over sentences before the division; expected from manual counts."""
    references = [CAT, ["a", "b", "c", "d", "e"]]
    hypotheses = [["the", "cat", "sat", "on", "a", "mat", "today"], ["a", "b", "c", "d"]]
    precisions = (6 + 4) / (7 + 4), (4 + 3) / (6 + 3), (2 + 2) / (5 + 2), (1 + 1) / (4 + 1)
    wanted = 100 * math.exp(sum(map(math.log, precisions)) / 4 + 1 - 12 / 11)
    assert corpus_bleu(references, hypotheses)[0] == pytest.approx(wanted)


def test_corpus_chrf_counts_characters():
    """A word with another ending matches in part, unlike in BLEU."""
    reference = [["des", "petits", "chats", "dorment", "ici"]]
    close = [["des", "petites", "chat", "dormaient", "ici"]]
    far = [["des", "xxxxxxx", "yyyy", "zzzzzzzzz", "ici"]]
    score, signature = corpus_chrf(reference, close)
    assert corpus_chrf(reference, reference)[0] == pytest.approx(100)
    assert corpus_bleu(reference, close)[0] == pytest.approx(corpus_bleu(reference, far)[0])
    assert 100 > score > 2 * corpus_chrf(reference, far)[0]
    assert "nc:6" in signature
    assert "nw:0" in signature


@pytest.mark.parametrize("function", [corpus_bleu, corpus_chrf])
def test_a_corpus_has_a_hypothesis_for_each_reference(function):
    name = function.__name__
    with pytest.raises(
        ValueError, match=f"{name}: hypotheses must have as many sentences as references = 2, got 1"
    ):
        function([CAT, CAT], [CAT])
    with pytest.raises(ValueError, match="as references = 1, got 2"):
        function([CAT], [CAT, CAT])
    with pytest.raises(
        ValueError, match=f"{name}: references must have at least 1 sentence, got 0"
    ):
        function([], [])
