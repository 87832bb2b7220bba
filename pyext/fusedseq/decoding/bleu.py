"""BLEU (Papineni et al., 2002) by NLTK for a sentence and by sacreBLEU for a corpus, and chrF.

The two definitions of BLEU give different numbers. All functions take sentences that the caller has
split into words, and are case-sensitive.
"""

import warnings
from collections.abc import Sequence
from typing import Any

SMOOTHING = ("method0", "method1")


def sentence_bleu(
    reference: Sequence[str], hypothesis: Sequence[str], smoothing: str = "method1"
) -> float:
    """Returns NLTK's sentence_bleu with one reference and equal weights up to 4-grams: 0 to 1.

    reference, hypothesis: lists of words
    smoothing: a method of NLTK's SmoothingFunction (Chen & Cherry, 2014). "method1" counts 0.1 for
        an n-gram order without a match in the reference. "method0", NLTK's default, takes 1e-308
        for its precision, so a sentence without a matching 4-gram, or with fewer than 4 words, has
        a BLEU of nearly 0

    The source reports take the mean of this over the sentences of a split. They do not state which
    smoothing they use.
    Errors: ValueError for another smoothing.
    """
    from nltk.translate import bleu_score

    if smoothing not in SMOOTHING:
        raise ValueError(
            f"sentence_bleu: smoothing must be {' or '.join(SMOOTHING)}, got {smoothing!r}"
        )
    method = getattr(bleu_score.SmoothingFunction(), smoothing)
    # NLTK warns about n-gram orders without a match that are not smoothed.
    with warnings.catch_warnings(action="ignore"):
        return float(bleu_score.sentence_bleu([reference], hypothesis, smoothing_function=method))


def corpus_bleu(
    references: Sequence[Sequence[str]], hypotheses: Sequence[Sequence[str]]
) -> tuple[float, str]:
    """Returns sacreBLEU (Post, 2018), 0 to 100, and its signature.

    The signature states how the score was computed and must be reported with it.
    references, hypotheses: for each sentence a list of its words. The words are joined by spaces,
    and sacreBLEU does not tokenize them again (its option tokenize="none"), so the score is not
    comparable with one of detokenized text.
    Errors: ValueError for lists of different lengths, and for empty ones; TypeError for sentences
    that are not lists of words.
    """
    from sacrebleu.metrics import BLEU

    # force suppresses the warning that the text is already tokenized
    return _score("corpus_bleu", BLEU(tokenize="none", force=True), references, hypotheses)


def corpus_chrf(
    references: Sequence[Sequence[str]], hypotheses: Sequence[Sequence[str]]
) -> tuple[float, str]:
    """Returns chrF2 (Popović, 2015) by sacreBLEU, 0 to 100, and its signature.

    It compares sequences of up to 6 characters without blanks, and counts recall twice as much as
    precision. A word with a wrong ending is therefore a partial match, unlike in BLEU.
    references, hypotheses: for each sentence a list of its words
    Errors: as for `corpus_bleu`.
    """
    from sacrebleu.metrics import CHRF

    return _score("corpus_chrf", CHRF(), references, hypotheses)


def _score(
    name: str, metric: Any, references: Sequence[Sequence[str]], hypotheses: Sequence[Sequence[str]]
) -> tuple[float, str]:
    """Returns the score of a corpus by a metric of sacreBLEU, and the metric's signature.

    name: of the function, for messages
    """
    if not references:
        raise ValueError(f"{name}: references must have at least 1 sentence, got 0")
    if len(hypotheses) != len(references):
        raise ValueError(
            f"{name}: hypotheses must have as many sentences as references = {len(references)}, "
            f"got {len(hypotheses)}"
        )
    check_words(name, references=references, hypotheses=hypotheses)
    score = metric.corpus_score(
        [" ".join(words) for words in hypotheses], [[" ".join(words) for words in references]]
    )
    return score.score, metric.get_signature().format()


def check_words(name: str, **corpora: Sequence[Sequence[str]]) -> None:
    """Requires that every sentence is a list of words. name: of the function, for messages"""
    for argument, sentences in corpora.items():
        for words in sentences:
            is_list = isinstance(words, Sequence) and not isinstance(words, str)
            if not is_list or not all(isinstance(word, str) for word in words):
                raise TypeError(
                    f"{name}: {argument} must be lists of words for each sentence, got {words!r}"
                )
