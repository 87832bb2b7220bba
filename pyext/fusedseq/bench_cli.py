"""`fusedseq bench`: runs the repository's bench/ folder under pytest, in a process of its own."""

import os
import subprocess
import sys
from pathlib import Path

from fusedseq.machine import REPOSITORY


def add_arguments(parser):
    parser.description = "Times the fused operators against plain PyTorch: a table, a JSON file and a picture."
    parser.add_argument("ops", nargs="*", metavar="OPERATOR", help="only these operators")
    parser.add_argument("--op", default="", help="the same, separated by commas")
    parser.add_argument(
        "--full", action="store_true", help="all rows and more rounds; by default about 11 minutes on 2 cores"
    )
    parser.add_argument("--device", default="cpu", help="cpu (default) or cuda")
    parser.add_argument("--dtype", choices=("float32", "float64", "bfloat16"), help="run all rows in this dtype")
    parser.add_argument("--seconds", type=float, help="measuring time of a row (default 4, with --full 20)")
    parser.add_argument(
        "--compile-seconds", type=float, help="longest torch.compile (default 60, with --full 240); 0: none"
    )
    parser.add_argument("--out", metavar="DIR", help="where JSON and PNG go (default bench/results)")
    parser.add_argument("--compare", metavar="OLD.json", help="say what got slower; exit code 1 where anything did")
    parser.add_argument("--threshold", type=float, default=0.1, help="how much slower is slower (default 0.1: 10 %%)")


def run(args):
    """The exit code: 0, 1 where a check failed or something got slower, 2 where there is nothing to run."""
    if not (REPOSITORY / "bench/suite.py").is_file():
        print("fusedseq bench needs the repository's bench/ folder, which is not part of the installed package: "
              "run it from a clone, e.g. make bench", file=sys.stderr)  # fmt: skip
        return 2
    if args.compare and not Path(args.compare).is_file():
        print(f"fusedseq bench: --compare: no such file: {args.compare}", file=sys.stderr)
        return 2
    missing = [name for name in ("pytest", "pytest_benchmark") if not installed(name)]
    if missing:
        print(f"fusedseq bench needs {' and '.join(missing)}: pip install pytest pytest-benchmark", file=sys.stderr)
        return 2
    ops = ",".join([*args.ops, *filter(None, args.op.split(","))])
    options = {"device": args.device, "op": ops, "threshold": args.threshold, "dtype": args.dtype, "seconds": args.seconds,
               "compile-seconds": args.compile_seconds, "out": args.out and Path(args.out).absolute(),
               "compare": args.compare and Path(args.compare).absolute()}  # fmt: skip
    command = [sys.executable, "-m", "pytest", "bench/suite.py", "-q", "-s", "--benchmark-quiet", "--benchmark-disable-gc",
               "-p", "no:cacheprovider", "--tb=short", "-W", "ignore::DeprecationWarning", *["--full"] * args.full,
               *(f"--{name}={value}" for name, value in options.items() if value not in (None, ""))]  # fmt: skip
    code = subprocess.run(command, cwd=REPOSITORY, env=environment(), check=False).returncode
    return 2 if code == 4 else code  # pytest's code for a wrong option


def installed(module):
    from importlib.util import find_spec

    return find_spec(module) is not None


def environment():
    """One thread a core, unless the user has said otherwise, and this very package."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    path = os.pathsep.join(filter(None, [str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH")]))
    return {"OMP_NUM_THREADS": str(cores), **os.environ, "PYTHONPATH": path}
