"""Runs the benchmark suite: python -m bench.suite [--mkl MODE] [OPTION OF conftest.py ...].

The suite is a pytest session of its own, in a child process, because a library that replaces a
function of MKL has to be preloaded before torch is loaded.
"""

import argparse
import signal
import subprocess
import sys
from pathlib import Path

from bench.suite import mkl

ROOT = Path(__file__).parents[2]
PYTEST = (
    "-q",
    "-s",
    "--benchmark-quiet",
    "--benchmark-disable-gc",
    "-p",
    "no:cacheprovider",
    "--tb=short",
    "-W",
    "ignore::DeprecationWarning",
    # The package that runs the suite is measured, not pyext/ of this folder.
    "-o",
    "pythonpath=.",
)


def main(argv=None):
    parser = argparse.ArgumentParser(
        prog="python -m bench.suite", add_help=False, allow_abbrev=False
    )
    mkl.add_argument(parser, mkl.BOTH)
    args, options = parser.parse_known_args(argv)
    command = [sys.executable, "-m", "pytest", "bench/suite/measure.py", *PYTEST]
    try:
        # With --mkl both, the session starts the process with the preloaded library.
        mode = mkl.MODES[0] if args.mkl == mkl.BOTH else args.mkl
        with mkl.environment(mode) as environment:
            # Ctrl-C is for the child, which prints what it has finished; it also reaches this
            # process, which waits. A handler of Python, unlike SIG_IGN, is not inherited.
            signal.signal(signal.SIGINT, lambda *_: None)
            return subprocess.run(
                [*command, f"--mkl={args.mkl}", *options], cwd=ROOT, env=environment, check=False
            ).returncode
    except (OSError, subprocess.CalledProcessError) as error:
        print(f"--mkl {args.mkl}: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
