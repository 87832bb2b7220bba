"""`fusedseq data TASK`: what a task's document says of its data, as tables."""

import importlib
import random

TASKS = {  # each with load(data, seed=...), whose result has sides()
    "words": "fusedseq.data.words",
    "ptb": "fusedseq.data.corpus",
    "reverse": "fusedseq.data.reverse",
    "en-es": "fusedseq.data.en_es",
    "en-fr": "fusedseq.data.en_fr",
}
# min, mean and max are words in a sentence; OOV: out of the vocabulary
COLUMNS = ("sentences", "words", "types", "min", "mean", "max", "OOV types", "OOV words", "OOV")


def add_arguments(parser):
    parser.add_argument("task", choices=TASKS)
    parser.add_argument("--data", metavar="DIR", help="the data's directory, or 'synthetic' (default: $FUSEDSEQ_DATA)")
    parser.add_argument("--seed", type=int, default=0, help="of the split and of what is generated (default: 0)")
    parser.add_argument("--top", type=int, default=10, help="how many of the most frequent words (default: 10)")
    parser.add_argument("--batch", type=int, default=64, help="sentences in a batch, for the padding (default: 64)")


def run(args):
    from rich.console import Console

    if args.top < 0:
        raise ValueError(f"--top must be at least 0, got {args.top}")
    module = importlib.import_module(TASKS[args.task])
    loaded = module.load(args.data, seed=args.seed)
    console = Console(highlight=False, **({} if Console().is_terminal else {"width": 200}))  # nothing is cut in a file
    for side in loaded.sides():
        statistics = side.statistics()
        console.print(f"{args.task}, {side.name}: vocabulary of {len(side.vocabulary):,}")
        console.print(sentences_table(statistics))
        if args.top:
            console.print(f"{args.task}, {side.name}: most frequent words")
            console.print(top_table(statistics, args.top))
    for line in remarks(loaded, args.batch):
        console.print(line, markup=False)


def sentences_table(statistics):
    """A row of figures for each split."""
    table = _table("split")
    for name in COLUMNS:
        table.add_column(name, justify="right")
    for split, s in statistics.items():
        table.add_row(split, f"{s.sentences:,}", f"{s.words:,}", f"{s.types:,}", f"{s.shortest}", f"{s.mean:.2f}",
                      f"{s.longest:,}", f"{s.unknown_types:,}", f"{s.unknown_words:,}", f"{s.unknown_words / max(s.words, 1):.2%}")  # fmt: skip
    return table


def top_table(statistics, top):
    """The most frequent words of each split, with their counts."""
    from rich.markup import escape

    table = _table("rank", *statistics)
    columns = [[f"{escape(word)} {n:,}" for word, n in s.counts.most_common(top)] for s in statistics.values()]
    for rank in range(max(map(len, columns))):
        table.add_row(str(rank + 1), *(column[rank] if rank < len(column) else "" for column in columns))
    return table


def _table(*columns):
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    return Table(*columns, box=SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)


def remarks(loaded, batch):
    """Lines on what was left out of parallel data, and on how much of a batch is padding."""
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
        yield (f"{language.name}, train, batches of {batch}: {padding(lengths, batches.numbers):.1%} padding by length, "
               f"{padding(lengths, mixed):.1%} in random order")  # fmt: skip
