"""`fusedseq bench`: runs the benchmark suite of a clone of the repository."""

import argparse
import os
import signal
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import fusedseq

SUITE = Path("bench/suite/measure.py")  # in a clone
NEEDED = ("pytest", "pytest_benchmark")  # by the suite; the peers are timed without them
# The options that the measurement of the peers has, too.
WITH_PEERS = ("op", "ops", "seconds", "out", "record", "peers")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of the command."""
    parser.description = (
        "Times the fused operators against plain PyTorch; writes a table, a JSON file and a plot. "
        "Run it in the root of a clone of the repository."
    )
    add = parser.add_argument
    add("ops", nargs="*", metavar="OPERATOR", help="only these operators")
    add("--op", default="", help="operators as one word, separated by commas; as OPERATOR")
    add(
        "--full",
        action="store_true",
        help="all cases and more rounds; by default about 11 minutes on 2 cores",
    )
    add("--device", default="cpu", help="cpu (default) or cuda")
    add("--dtype", choices=("float32", "float64", "bfloat16"), help="run all cases in this dtype")
    add(
        "--mkl",
        choices=("as-installed", "unthrottled", "both"),
        default="as-installed",
        help="unthrottled: preload a library that makes MKL use AVX-512 on AMD processors too; "
        "both: time the baselines with MKL as installed and, in a second process, unthrottled, "
        "which disturbs calls that take less than some milliseconds; the same as as-installed "
        "where MKL has no limit (default: %(default)s)",
    )
    add(
        "--peers",
        action="store_true",
        help="time the operators beside other libraries instead: JAX, ONNX Runtime and, for "
        "OPERATOR translate, CTranslate2; each of them that is installed "
        "(pip install --no-build-isolation '.[peers]' in a copy of the repository)",
    )
    add("--seconds", type=float, help="measuring time of a case (default 4, with --full 20)")
    add(
        "--compile-seconds",
        type=float,
        help="time limit of torch.compile (default 60, with --full 240); 0 skips it",
    )
    add("--out", metavar="DIR", help="the directory for JSON and PNG (default build/bench)")
    add(
        "--record",
        action="store_true",
        help="write JSON and PNG into bench/results, whose files are committed",
    )
    add(
        "--compare",
        metavar="OLD.json",
        help="report what became slower; the exit code is 1 if anything did",
    )
    add(
        "--threshold",
        type=float,
        default=0.1,
        help="relative slowdown that counts as slower (default 0.1: 10 %%)",
    )


def run(args: argparse.Namespace) -> int:
    """Runs the command.

    Returns 0; 1 where a check failed or a case became slower; 2 where nothing can be run; 130 after
    Ctrl-C.
    """
    clone = Path.cwd()
    if not (clone / SUITE).is_file():
        print(
            f"fusedseq bench: there is no {SUITE} in the current directory. The benchmarks are not "
            "part of the installed package: run this command in the root of a clone of the "
            "repository, or make bench there",
            file=sys.stderr,
        )
        return 2
    if args.compare and not Path(args.compare).is_file():
        print(f"fusedseq bench: --compare: no such file: {args.compare}", file=sys.stderr)
        return 2
    if args.peers and (others := given(args) - {*WITH_PEERS}):
        known = "OPERATOR, --op, --seconds, --out and --record"
        got = ", ".join(f"--{name.replace('_', '-')}" for name in sorted(others))
        print(f"fusedseq bench: --peers takes {known}, got {got}", file=sys.stderr)
        return 2
    missing = [name for name in NEEDED if not args.peers and not find_spec(name)]
    if missing:
        packages = " ".join(name.replace("_", "-") for name in missing)
        print(
            f"fusedseq bench: needs Python packages that are not installed: pip install {packages}",
            file=sys.stderr,
        )
        return 2
    if args.record and args.out:
        print(
            "fusedseq bench: --record writes into bench/results: give it, or --out, not both",
            file=sys.stderr,
        )
        return 2
    print(
        f"fusedseq bench: benchmarks of the clone in {clone}, of the package in "
        f"{Path(fusedseq.__file__).parent}; Ctrl-C ends it with a table of what is finished",
        flush=True,
    )
    # Ctrl-C is for the process that measures, which prints the table; this one waits for it.
    before = signal.signal(signal.SIGINT, lambda *_: None)
    try:
        code = subprocess.run(command(args), cwd=clone, env=environment(), check=False).returncode
    finally:
        signal.signal(signal.SIGINT, before)
    return 2 if code == 4 else code  # pytest's code for a wrong option


def given(args: argparse.Namespace) -> set[str]:
    """The names of the options that differ from their defaults."""
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    defaults = vars(parser.parse_args([]))
    return {name for name, default in defaults.items() if getattr(args, name) != default}


def command(args: argparse.Namespace) -> list[str]:
    """The command of the suite, which is a pytest session in a process of its own, or of the
    peers."""
    options = {
        "device": args.device,
        "mkl": args.mkl,
        "op": ",".join([*args.ops, *filter(None, args.op.split(","))]),
        "threshold": args.threshold,
        "dtype": args.dtype,
        "seconds": args.seconds,
        "compile-seconds": args.compile_seconds,
        "out": args.out and Path(args.out).absolute(),
        "compare": args.compare and Path(args.compare).absolute(),
    }
    if args.peers:
        options = {name: options[name] for name in ("op", "seconds", "out")}
    flags = [*["--full"] * args.full, *["--record"] * args.record]
    valued = (f"--{name}={value}" for name, value in options.items() if value not in (None, ""))
    module = "bench.peers" if args.peers else "bench.suite"
    return [sys.executable, "-m", module, *flags, *valued]


def environment() -> dict[str, str]:
    """Environment variables that make the suite measure the package that runs this command.

    OMP_NUM_THREADS is the number of cores, unless the user has set it.
    """
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    package = str(Path(fusedseq.__file__).parents[1])
    path = os.pathsep.join(filter(None, [package, os.environ.get("PYTHONPATH")]))
    return {"OMP_NUM_THREADS": str(cores), **os.environ, "PYTHONPATH": path}
