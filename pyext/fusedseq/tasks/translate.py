"""`fusedseq translate CHECKPOINT`: lines in, their translations out."""

import sys
from itertools import islice
from pathlib import Path

from fusedseq.data.locate import read_lines
from fusedseq.tasks.catalog import OPERATORS
from fusedseq.tasks.restored import restored
from fusedseq.tasks.search import Search, search_all
from fusedseq.tasks.train import add_device_argument, usable_device
from fusedseq.tasks.translation import SOURCES, languages

BATCHES = 32  # that are read before the first is translated, to be put together by length


def add_arguments(parser):
    add = parser.add_argument
    add("checkpoint", type=Path, help="a run's directory (its best.safetensors), or a checkpoint, of en-es or en-fr")
    add(
        "--in",
        type=Path,
        metavar="FILE",
        dest="input",
        help="text, a sentence a line, plain or .gz (default: what comes in)",
    )
    add("--beam", type=int, default=Search.beam, help="hypotheses of a sentence; 1 is greedy (default: %(default)s)")
    add("--length-penalty", type=float, default=Search.length_penalty, metavar="ALPHA",
        help="0 ranks by log-probability, more prefers longer translations (default: %(default)s)")  # fmt: skip
    add("--n-best", type=int, metavar="N",
        help="write the N best as lines of number, score and translation, tabs between (default: the best alone)")  # fmt: skip
    add("--batch", type=int, default=Search.batch, help="sentences at a time (default: %(default)s)")
    add("--max-length", type=int, metavar="WORDS", help="of a translation (default: twice the source's and 10 more)")
    add("--ops", choices=OPERATORS, default="fused", help="which operators (default: fused)")
    add_device_argument(parser)


def run(args):
    n_best = 1 if args.n_best is None else args.n_best
    search = Search(args.beam, args.length_penalty, n_best, args.batch, args.max_length)
    model, description = restored(args.checkpoint, tuple(SOURCES), ops=args.ops, device=usable_device(args.device))
    translator = Lines(model, description, search)
    lines = opened(args.input)
    chunk = 1 if args.input is None and sys.stdin.isatty() else BATCHES * args.batch  # who types is answered at once
    count = 0
    while part := list(islice(lines, chunk)):
        for number, hypotheses in enumerate(translator(part, count + 1), count + 1):
            if args.n_best is None:
                print(hypotheses[0][1])
                continue
            for score, text in hypotheses:
                print(f"{number}\t{score:.6f}\t{text}")
        sys.stdout.flush()
        count += len(part)


def opened(path):
    """The lines of a file, or of the standard input; only \\n ends one."""
    if path is not None:
        return iter(read_lines(path))
    if hasattr(sys.stdin, "reconfigure"):
        sys.stdin.reconfigure(encoding="utf-8", newline="\n")
    return iter(sys.stdin)


class Lines:
    """Translates lines of text: for each its hypotheses, (score, text), words joined by blanks; of an empty one "" alone."""

    def __init__(self, model, description, search):
        self.model, self.search = model, search
        self.source, self.target = languages(description)
        self.longest = description["settings"]["data"]["max_length"]

    def __call__(self, lines, first):
        """first: the number of the first line, for what is said of a line"""
        words = [self.source.tokenize(line.strip()) for line in lines]
        full = [i for i, sentence in enumerate(words) if sentence]
        for i in full:
            if len(words[i]) > self.longest - 2:
                print(f"fusedseq translate: line {first + i} has {len(words[i])} words, of which the first "
                      f"{self.longest - 2} are read: the model was trained on no more", file=sys.stderr)  # fmt: skip
        found = search_all(
            self.model, [self.source.encode(words[i], self.longest) for i in full], self.longest, self.search
        )
        results = [[(0.0, "")] for _ in lines]
        for i, hypotheses in zip(full, found, strict=True):
            results[i] = [(h.score, " ".join(self.target.decode(h.ids))) for h in hypotheses]
        return results
