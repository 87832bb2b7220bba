"""Results of the experiments that the repository contains.

python -m bench.experiments add RUN_DIR     records the result of a finished run
python -m bench.experiments pages           writes docs/results.md, docs/results, docs/model-cards,
                                            docs/smoke_runs.md and the curves
"""

import argparse
import sys
from pathlib import Path

from bench.experiments import pages, record
from bench.experiments.results import FOLDER, ROOT


def main(argv=None):
    parser = argparse.ArgumentParser(
        prog="python -m bench.experiments", description=__doc__.partition("\n")[0]
    )
    verbs = parser.add_subparsers(dest="verb", required=True)
    adding = verbs.add_parser("add", help="record the result of a finished run")
    adding.add_argument("run", type=Path, metavar="RUN_DIR", help="the directory of a finished run")
    adding.add_argument("--experiment", help="the experiment (default: TASK/PRESET)")
    adding.add_argument("--label", help="distinguishes runs of one experiment, e.g. reduced")
    adding.add_argument(
        "--note", help="what the settings do not say, e.g. why it was stopped early"
    )
    adding.add_argument("--data", help="the name of its data, if the run did not record it")
    adding.add_argument(
        "--eval",
        type=Path,
        metavar="JSON",
        help="more metrics of the run, as `fusedseq eval --json` prints them",
    )
    adding.add_argument(
        "--translations",
        type=Path,
        metavar="CSV",
        help="the table to take samples from, as `fusedseq eval --csv` writes it (default: the "
        "run's own, if it has one)",
    )
    adding.add_argument("--results", type=Path, default=ROOT / FOLDER, help=argparse.SUPPRESS)
    adding.set_defaults(run_verb=record.add)
    writing = verbs.add_parser("pages", help="write the pages and curves under docs")
    writing.add_argument("--root", type=Path, default=ROOT, help=argparse.SUPPRESS)
    writing.set_defaults(run_verb=pages.write)
    args = parser.parse_args(argv)
    try:
        args.run_verb(args)
    except (ValueError, OSError) as error:
        print(f"{parser.prog}: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
