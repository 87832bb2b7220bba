"""`fusedseq data TASK`: prints the statistics of a task's data as tables."""

import argparse
import importlib
import random
from collections.abc import Iterator, Mapping
from typing import Any

from fusedseq.data.escapes import escaped
from fusedseq.data.statistics import Statistics

TASKS = {  # modules with a function load(data, seed=...), whose result has a method sides()
    "words": "fusedseq.data.words",
    "ptb": "fusedseq.data.corpus",
    "reverse": "fusedseq.data.reverse",
    "en-es": "fusedseq.data.en_es",
    "en-fr": "fusedseq.data.en_fr",
}
# min, mean and max are words in a sentence; OOV is out of vocabulary
COLUMNS = ("sentences", "words", "types", "min", "mean", "max", "OOV types", "OOV words", "OOV")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of `fusedseq data`."""
    parser.add_argument("task", choices=TASKS, help="the task")
    parser.add_argument(
        "--data",
        metavar="DIR",
        help="directory of the data, or 'synthetic' (default: $FUSEDSEQ_DATA)",
    )
    parser.add_argument(
        "--seed", type=int, default=0, help="seed of the split and of generated data (default: 0)"
    )
    parser.add_argument(
        "--top", type=int, default=10, help="number of most frequent words to list (default: 10)"
    )
    parser.add_argument(
        "--batch",
        type=int,
        default=64,
        help="sentences in a batch, for the fraction of padding (default: 64)",
    )


def run(args: argparse.Namespace) -> None:
    """Prints the statistics. Errors: ValueError for a negative --top and for a --batch below 1"""
    from rich.console import Console

    if args.top < 0:
        raise ValueError(f"--top must be at least 0, got {args.top}")
    if args.batch < 1:
        raise ValueError(f"--batch must be at least 1, got {args.batch}")
    module = importlib.import_module(TASKS[args.task])
    loaded = module.load(args.data, seed=args.seed)
    # A fixed width for output to a file, where nothing should be cut off.
    width = None if Console().is_terminal else 200
    console = Console(highlight=False, width=width)
    for side in loaded.sides():
        statistics = side.statistics()
        console.print(f"{args.task}, {side.name}: vocabulary of {len(side.vocabulary):,}")
        console.print(sentences_table(statistics))
        if args.top:
            console.print(f"{args.task}, {side.name}: most frequent words")
            console.print(top_table(statistics, args.top))
    for line in remarks(loaded, args.batch):
        console.print(line, markup=False)


def sentences_table(statistics: Mapping[str, Statistics]) -> Any:
    """Returns a rich Table with a row of numbers for each split."""
    table = _table("split")
    for name in COLUMNS:
        table.add_column(name, justify="right")
    for split, s in statistics.items():
        table.add_row(
            split,
            f"{s.sentences:,}",
            f"{s.words:,}",
            f"{s.types:,}",
            f"{s.shortest}",
            f"{s.mean:.2f}",
            f"{s.longest:,}",
            f"{s.unknown_types:,}",
            f"{s.unknown_words:,}",
            f"{s.unknown_words / max(s.words, 1):.2%}",
        )
    return table


def top_table(statistics: Mapping[str, Statistics], top: int) -> Any:
    """Returns a rich Table of the `top` most frequent words of each split with their counts."""
    from rich.markup import escape

    table = _table("rank", *statistics)
    columns = [
        [f"{escape(escaped(word))} {n:,}" for word, n in s.counts.most_common(top)]
        for s in statistics.values()
    ]
    for rank in range(max(map(len, columns))):
        table.add_row(
            str(rank + 1), *(column[rank] if rank < len(column) else "" for column in columns)
        )
    return table


def _table(*columns: str) -> Any:
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    return Table(*columns, box=SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)


def remarks(loaded: object, batch: int) -> Iterator[str]:
    """Yields lines about dropped pairs and the padding of batches, for parallel data only."""
    from fusedseq.data.length_batching import padding
    from fusedseq.data.parallel import PairBatches, ParallelCorpus

    if not isinstance(loaded, ParallelCorpus):
        return
    for why, n in loaded.dropped.items():
        yield f"left out, {why}: {n:,} pairs"
    batches = PairBatches(loaded.train, batch, key="")
    order = random.Random(0).sample(range(len(batches.lengths)), len(batches.lengths))
    mixed = [order[start : start + batch] for start in range(0, len(order), batch)]
    for place, language in ((1, loaded.source), (0, loaded.target)):
        lengths = [pair[place] for pair in batches.lengths]
        yield (
            f"{language.name}, train, batches of {batch}: "
            f"{padding(lengths, batches.numbers):.1%} padding by length, "
            f"{padding(lengths, mixed):.1%} in random order"
        )
