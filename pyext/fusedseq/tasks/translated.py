"""A split translated and judged: BLEU, a table of its sentences, samples."""

import csv
import os
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from fusedseq.data.parallel import UNKNOWN
from fusedseq.decoding.bleu import corpus_bleu, sentence_bleu
from fusedseq.tasks.search import Search, search_all


class Translation(NamedTuple):
    """A row of the table; sentences are words joined by blanks."""

    source: str
    reference: str
    hypothesis: str
    bleu: float  # NLTK's, smoothed
    bleu_unsmoothed: float
    source_words: int
    reference_words: int
    hypothesis_words: int
    log_prob: float  # of the hypothesis


def translate_split(task, split, search):
    """The figures of a split's translations, and a list of Translation in the order of the split.

    task: a translation.Task, its model in eval mode    search: a Search
    bleu is the document's: NLTK's of sentences, averaged, smoothed by method1, of the words as the model's ids tell them: in the
    reference too a word out of the vocabulary is the unknown word, and equals one in the hypothesis. bleu_unsmoothed is the
    same with NLTK's default; the document does not say which it used. sacrebleu is of the reference's own words, in no
    vocabulary or not.
    """
    pairs, target = getattr(task.data, split), task.data.target
    found = search_all(task.model, pairs.source, task.settings.data.max_length, search)
    hypotheses = [target.decode(hypotheses[0].ids) for hypotheses in found]
    rows = []
    for i, words in enumerate(hypotheses):
        source, reference = pairs.source_words[i], pairs.target_words[i]
        known = [word if word in target.vocabulary.ids else target.specials[UNKNOWN] for word in reference]
        text = [" ".join(sentence) for sentence in (source, reference, words)]
        scores = [sentence_bleu(known, words, smoothing) for smoothing in ("method1", "method0")]
        rows.append(Translation._make((*text, *scores, *map(len, (source, reference, words)), found[i][0].log_prob)))
    score, signature = corpus_bleu(pairs.target_words, hypotheses)
    figures = {
        "beam": search.beam, "bleu": mean([row.bleu for row in rows]),
        "bleu_unsmoothed": mean([row.bleu_unsmoothed for row in rows]), "sacrebleu": score, "sacrebleu_signature": signature,
        "length_ratio": sum(row.hypothesis_words for row in rows) / sum(row.reference_words for row in rows),
    }  # fmt: skip
    return figures, rows


def mean(numbers):
    return sum(numbers) / len(numbers)


def greedy_figures(task, split, out):
    """The figures of a split translated greedily, its sentences in out/SPLIT-greedy.csv; none where a package is missing."""
    try:
        figures, rows = translate_split(task, split, Search(beam=1, batch=task.settings.data.eval_batch))
    except ImportError as error:
        print(f"no BLEU: it needs the Python package {error.name} (pip install {error.name})", flush=True)
        return {}
    write_table(Path(out) / f"{split}-greedy.csv", rows)
    return figures


def write_table(path, rows):
    """Rows, NamedTuples of one kind, as CSV. The file is whole or the old one."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with temporary.open("w", newline="", encoding="utf-8") as file:
            table = csv.writer(file, lineterminator="\n")
            table.writerow(rows[0]._fields)
            table.writerows(rows)
        os.replace(temporary, path)
    finally:
        with suppress(FileNotFoundError):
            temporary.unlink()


def samples(rows, n):
    """`n` of the rows, at equal distances, for people to read."""
    n = min(n, len(rows))
    chosen = [rows[i * len(rows) // n] for i in range(n)]
    return "\n\n".join(
        f"source:    {row.source}\nreference: {row.reference}\nours:      {row.hypothesis}" for row in chosen
    )
