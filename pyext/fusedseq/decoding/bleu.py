"""BLEU (Papineni et al., 2002) in two definitions that give different numbers: NLTK's of sentences, averaged, and
sacreBLEU's of a corpus. Both here are of words as the caller parted them, and tell capitals from small letters."""

import warnings

SMOOTHING = ("method0", "method1")


def sentence_bleu(reference, hypothesis, smoothing="method1"):
    """nltk.translate.bleu_score.sentence_bleu of one reference, to 4-grams, equally weighted: 0 to 1.

    reference, hypothesis: lists of words    smoothing: a method of NLTK's SmoothingFunction (Chen & Cherry, 2014): "method1"
        counts 0.1 for n-grams of which none is in the reference, "method0", NLTK's default, takes 1e-308 for their precision, so
        that a sentence without a 4-gram in common, or of fewer than 4 words, has a BLEU of nearly 0

    The document's figure is the mean of this over a split's sentences. It does not say with which smoothing.
    """
    from nltk.translate import bleu_score

    if smoothing not in SMOOTHING:
        raise ValueError(f"sentence_bleu: smoothing must be {' or '.join(SMOOTHING)}, got {smoothing!r}")
    method = getattr(bleu_score.SmoothingFunction(), smoothing)
    with warnings.catch_warnings(action="ignore"):  # at n-grams that are not smoothed
        return float(bleu_score.sentence_bleu([reference], hypothesis, smoothing_function=method))


def corpus_bleu(references, hypotheses):
    """sacreBLEU (Post, 2018), 0 to 100, and its signature, which says how it was computed and must go with the number.

    references, hypotheses: for each sentence its words, a list. They are joined by blanks, and sacreBLEU takes them so (its
    option tokenize="none"): a score of these words, not comparable with one of detokenised text.
    """
    from sacrebleu.metrics import BLEU

    metric = BLEU(tokenize="none", force=True)  # force: no warning that the text has been parted already
    score = metric.corpus_score([" ".join(words) for words in hypotheses], [[" ".join(words) for words in references]])
    return score.score, metric.get_signature().format()
