"""Translates a split and scores it: BLEU, chrF, a table of its sentences, samples."""

import csv
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from fusedseq.data.parallel import UNKNOWN
from fusedseq.decoding.bleu import corpus_bleu, corpus_chrf, sentence_bleu
from fusedseq.tasks.training.files import replaced
from fusedseq.tasks.translation.search import Search, search_all


class Translation(NamedTuple):
    """A row of the table; sentences are words joined by blanks."""

    source: str
    reference: str
    hypothesis: str
    bleu: float  # NLTK's sentence BLEU, smoothed
    bleu_unsmoothed: float
    source_words: int
    reference_words: int
    hypothesis_words: int
    log_prob: float  # of the hypothesis


def translate_split(
    task: Any, split: str, search: Search
) -> tuple[dict[str, Any], list[Translation]]:
    """The metrics of a split's translations, and its Translations in the order of the split.

    task: a translation task with its model in eval mode
    bleu is the metric of the source report english_french: NLTK's sentence BLEU, averaged, smoothed
    by method1, over the words that the model's ids stand for. A reference word outside the
    vocabulary is therefore the unknown word, and matches it in the hypothesis. bleu_unsmoothed is
    the same with NLTK's default; the report does not say which of the two it used. sacrebleu
    and chrf use the reference's own words, whether or not they are in the vocabulary.
    """
    pairs, target = getattr(task.data, split), task.data.target
    longest = task.settings.data.max_length
    found = search_all(task.model, pairs.source, longest, search, f"translating {split}")
    hypotheses = [target.decode(best[0].ids) for best in found]
    table = []
    for i, words in enumerate(hypotheses):
        source, reference = pairs.source_words[i], pairs.target_words[i]
        unknown = target.specials[UNKNOWN]
        known = [word if word in target.vocabulary.ids else unknown for word in reference]
        text = [" ".join(sentence) for sentence in (source, reference, words)]
        scores = [sentence_bleu(known, words, smoothing) for smoothing in ("method1", "method0")]
        lengths = map(len, (source, reference, words))
        table.append(Translation._make((*text, *scores, *lengths, found[i][0].log_prob)))
    score, signature = corpus_bleu(pairs.target_words, hypotheses)
    chrf, chrf_signature = corpus_chrf(pairs.target_words, hypotheses)
    metrics = {
        "beam": search.beam,
        "bleu": mean([row.bleu for row in table]),
        "bleu_unsmoothed": mean([row.bleu_unsmoothed for row in table]),
        "sacrebleu": score,
        "sacrebleu_signature": signature,
        "chrf": chrf,
        "chrf_signature": chrf_signature,
        "length_ratio": sum(row.hypothesis_words for row in table)
        / sum(row.reference_words for row in table),
    }
    return metrics, table


def mean(numbers: Sequence[float]) -> float:
    """The arithmetic mean."""
    return sum(numbers) / len(numbers)


def greedy_metrics(task: Any, split: str, out: str | Path) -> dict[str, Any]:
    """The metrics of a split translated greedily, with its table in out/SPLIT-greedy.csv.

    Without one of the BLEU packages it prints which one is missing and returns no metric.
    """
    search = Search(beam=1, batch=task.settings.data.eval_batch)
    try:
        metrics, table = translate_split(task, split, search)
    except ImportError as error:
        print(
            f"no BLEU: it needs the Python package {error.name} (pip install {error.name})",
            flush=True,
        )
        return {}
    try:
        write_table(Path(out) / f"{split}-greedy.csv", table)
    except OSError as error:  # e.g. a full disk, which must not lose the metrics
        print(f"no table of the translations: {error}", flush=True)
    return metrics


def write_table(path: Path, table: Sequence[Any]) -> None:
    """Writes NamedTuples of one type as CSV; the file is replaced as a whole."""
    with replaced(path) as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(table[0]._fields)
        writer.writerows(table)


def samples(table: Sequence[Translation], n: int) -> str:
    """`n` translations as text, taken at equal distances from the table."""
    n = min(n, len(table))
    chosen = [table[i * len(table) // n] for i in range(n)]
    return "\n\n".join(
        f"source:    {row.source}\nreference: {row.reference}\nours:      {row.hypothesis}"
        for row in chosen
    )
