"""Times the fused operators beside JAX, ONNX Runtime and CTranslate2, in one process.

python -m bench.peers [--peers PEER ...] [--op OPERATOR,...] [--seconds S] [--record | --out DIR]

`fusedseq bench --peers` is the same command. Its result file is shown by `python -m
bench.suite.pages`, in docs/benchmarks.
"""

import argparse
import json
import sys
from pathlib import Path

import torch

from bench.peers import installed, operators, page, trained_translator, translation
from bench.peers.case_list import CASES
from bench.suite import machine, report

ROOT = Path(__file__).parents[2]
RECORDED, OUT = ROOT / "bench/results", ROOT / "build/bench"
OPERATORS = (*dict.fromkeys(case.op for case in CASES), "translate")


def parse(argv):
    parser = argparse.ArgumentParser(
        prog="python -m bench.peers", description=__doc__.partition("\n")[0], allow_abbrev=False
    )
    add = parser.add_argument
    add("--peers", nargs="+", choices=installed.PEERS, default=[*installed.PEERS], metavar="PEER")
    add("--op", default="", help=f"only these, separated by commas: {', '.join(OPERATORS)}")
    add("--case", default="", help="only the cases whose name contains this text")
    add("--seconds", type=float, default=3.0, help="measuring time of a case (default %(default)s)")
    add(
        "--train-steps",
        type=int,
        default=400,
        help="steps of the translator on generated text (default %(default)s)",
    )
    add("--out", type=Path, help="the directory of the JSON file (default build/bench)")
    add("--record", action="store_true", help="write into bench/results, to be committed")
    args = parser.parse_args(argv)
    args.ops = [op for op in args.op.split(",") if op] or [*OPERATORS]
    if unknown := sorted({*args.ops} - {*OPERATORS}):
        parser.error(
            f"--op: no such operator: {', '.join(unknown)}; known are {', '.join(OPERATORS)}"
        )
    if args.out and args.record:
        parser.error("--record writes into bench/results: give it, or --out, not both")
    return args


def usable(peers):
    """Returns {peer: its module} of the installed peers; says what to install for the others."""
    for peer in peers:
        if installed.missing(peer):
            print(f"bench.peers: {installed.sentence(peer)}", file=sys.stderr)
    return {peer: installed.load(peer) for peer in peers if not installed.missing(peer)}


def measurements(args, peers):
    """Returns [(name, a function that returns the case's row)] of everything that is timed."""
    callers = {name: peer for name, peer in peers.items() if name != "ctranslate2"}
    found = [
        (case.name, lambda case=case: operators.measure(case, callers, args.seconds))
        for case in CASES
        if case.op in args.ops and any(peer.supports(case) for peer in callers.values())
    ]
    if "ctranslate2" in peers and "translate" in args.ops:
        loaded = []  # the model is trained at most once, and only if it is needed

        def measure(beam):
            if not loaded:
                loaded.append(trained_translator.load(args.train_steps))
            return translation.measure(peers["ctranslate2"], loaded[0], beam, args.seconds)

        for beam in translation.BEAMS:
            name = translation.case_name(beam)
            found.append((name, lambda beam=beam: measure(beam)))
    return [(name, row) for name, row in found if args.case in name]


def main(argv=None):
    args = parse(argv)
    peers = usable(args.peers)
    if not peers:
        print("bench.peers: no peer is installed, so nothing is timed", file=sys.stderr)
        return 2
    chosen = measurements(args, peers)
    if not chosen:
        print("bench.peers: no case is selected, so nothing is timed", file=sys.stderr)
        return 2
    facts = machine.facts("cpu")
    facts["versions"] |= installed.versions(peers)
    result = {
        **facts,
        "mkl": "as-installed",
        "device": "cpu",
        "peers": {name: peer.settings() for name, peer in peers.items()},
        "train steps": args.train_steps,
        "rows": [],
    }
    print("\n".join(report.heading(result, machine.load())), file=sys.stderr)
    failures, interrupted = 0, False
    try:
        for failed in measure_all(chosen, result["rows"]):
            failures += failed
    except KeyboardInterrupt:
        interrupted = True
        finished = f"{len(result['rows'])} of {len(chosen)} cases"
        print(f"\ninterrupted after {finished}", file=sys.stderr)
    print("\n\n".join(page.tables(result["rows"])))
    if not result["rows"]:
        return 130 if interrupted else 1
    write(result, args, interrupted)
    return 130 if interrupted else int(failures > 0)


def write(result, args, interrupted):
    """Writes the result file, named after the machine and the chosen operators."""
    folder = RECORDED if args.record else args.out or OUT
    folder.mkdir(parents=True, exist_ok=True)
    parts = [machine.slug(result, "cpu"), "peers", args.op.replace(",", "-")]
    parts.append("partial" * interrupted)
    path = folder / ("-".join(filter(None, parts)) + ".json")
    path.write_text(json.dumps(result, indent=1) + "\n")
    print(f"written: {path}")


def measure_all(chosen, rows):
    """Appends the row of each case to `rows`; yields for each whether its result is wrong.

    A case with a wrong result has no row.
    """
    for number, (name, row) in enumerate(chosen, 1):
        print(f"[{number}/{len(chosen)}] {name}: ", end="", file=sys.stderr, flush=True)
        torch.manual_seed(0)
        try:
            rows.append(row())
        except ValueError as error:
            print(f"WRONG: {error}", file=sys.stderr, flush=True)
            yield True
        else:
            print(page.times(rows[-1]), file=sys.stderr, flush=True)
            yield False


if __name__ == "__main__":
    sys.exit(main())
