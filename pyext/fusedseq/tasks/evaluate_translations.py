"""`fusedseq eval en-es|en-fr RUN --beam 4`: BLEU, a table of all sentences, samples."""

import sys
from dataclasses import fields
from pathlib import Path

from fusedseq.tasks.search import Search
from fusedseq.tasks.translated import samples, translate_split, write_table
from fusedseq.tasks.translation import SOURCES

TASKS = tuple(SOURCES)
OPTIONS = ("beam", "length_penalty", "batch", "max_length", "csv", "samples")


def add_arguments(group):
    add = group.add_argument
    add("--beam", type=int, metavar="K", help=f"translate with K hypotheses of a sentence; 1 is greedy (default: {Search.beam}, "
        "where another of these is given)")  # fmt: skip
    add("--length-penalty", type=float, metavar="ALPHA", help=f"(default: {Search.length_penalty})")
    add("--batch", type=int, help=f"sentences at a time (default: {Search.batch})")
    add("--max-length", type=int, metavar="WORDS", help="of a translation (default: twice the source's and 10 more)")
    add("--csv", type=Path, metavar="FILE", help="write source, reference, translation and scores of each sentence")
    add("--samples", type=int, metavar="N", help="print N translations")


def figures(task, splits, args):
    if args.csv and len(splits) > 1:
        raise ValueError(f"--csv is of one split, got --splits {','.join(splits)}")
    if args.samples is not None and args.samples < 1:
        raise ValueError(f"--samples must be at least 1, got {args.samples}")
    given = {field.name: getattr(args, field.name, None) for field in fields(Search)}
    search = Search(**{name: value for name, value in given.items() if value is not None})
    results = {}
    for split in splits:
        results[split], rows = translate_split(task, split, search)
        if args.csv:
            write_table(args.csv, rows)
        if args.samples:
            print(samples(rows, args.samples) + "\n", file=sys.stderr if args.json else sys.stdout)
    return results
