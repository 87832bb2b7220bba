"""`fusedseq COMMAND ...`: the command line.

Every command is a module with `add_arguments(parser)` and `run(args)`, which returns the exit code
(None stands for 0). Exit code 2, with one sentence on standard error, reports a mistake of the
caller, a missing file, or a missing package.
"""

import argparse
import importlib
import os
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from typing import Any, NoReturn

import fusedseq
from fusedseq import _load

# {name: (module, summary)}; the module of a command is imported when the command is called.
COMMANDS = {
    "info": (
        "fusedseq.info",
        "show the build and the machine, and check every operator against its oracle",
    ),
    "demo": (
        "fusedseq.tasks.commands.demo",
        "train a small language model and a translator, use them, and time operators: a minute",
    ),
    "bench": (
        "fusedseq.tasks.commands.bench",
        "time the fused operators against plain PyTorch, in a clone of the repository",
    ),
    "tune-kernels": (
        "fusedseq.tune_kernels",
        "time the kernels of your sizes on this GPU, and write a table that calls can choose by",
    ),
    "train": ("fusedseq.tasks.commands.train", "train a documented configuration, or resume a run"),
    "tune": (
        "fusedseq.tasks.commands.tune",
        "search hyper-parameters with many short runs, shared among processes",
    ),
    "grid": ("fusedseq.tasks.commands.grid", "train all configurations of a documented table"),
    "data": (
        "fusedseq.data.report",
        "show statistics of a task's data: sentences, words, frequent and unknown words",
    ),
    "list": (
        "fusedseq.tasks.commands.list",
        "list every documented experiment: reported metrics, our metrics, and its command",
    ),
    "ensemble": (
        "fusedseq.tasks.commands.ensemble",
        "train several word predictors and evaluate their vote and their average",
    ),
    "eval": ("fusedseq.tasks.commands.eval", "compute the metrics of a trained model"),
    "vectors": (
        "fusedseq.tasks.commands.vectors",
        "export a trained model's word vectors as a word2vec file, or show a word's neighbours",
    ),
    "translate": (
        "fusedseq.tasks.commands.translate",
        "translate lines of text with a trained model",
    ),
    "generate": ("fusedseq.tasks.commands.generate", "sample text from a trained language model"),
}

# The packages of the extra "tasks" in pyproject.toml.
PACKAGES = ("rich", "tensorboard", "matplotlib", "tokenizers", "nltk", "sacrebleu", "optuna")


class Parser(argparse.ArgumentParser):
    """An ArgumentParser that reports errors in one line."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message} (see {self.prog} --help)\n")


class Version(argparse.Action):
    """Prints the versions of this package and of torch, without importing torch."""

    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> NoReturn:
        from importlib import metadata

        try:
            torch = f"torch {metadata.version('torch')}"
        except metadata.PackageNotFoundError:
            torch = "torch is not installed"
        print(f"fusedseq {fusedseq.__version__}, {torch}")
        parser.exit(0)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line and returns the exit code.

    argv: the arguments without the program's name; None reads sys.argv
    """
    argv = sys.argv[1:] if argv is None else argv
    parser = Parser(
        prog="fusedseq",
        description="Fused operators for classic sequence models.",
        epilog="With FUSEDSEQ_TRACEBACK=1 in the environment, errors show their traceback.",
    )
    parser.add_argument(
        "--version",
        action=Version,
        nargs=0,
        help="print the versions of fusedseq and of torch, and exit",
    )
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    subparsers = {
        name: commands.add_parser(name, help=summary, description=summary)
        for name, (_, summary) in COMMANDS.items()
    }
    try:
        traceback = _load.variable("FUSEDSEQ_TRACEBACK", "0", "1") == "1"
    except ValueError as error:
        parser.error(str(error))
    called = next((word for word in argv if not word.startswith("-")), None)
    try:
        if called in COMMANDS:
            module = importlib.import_module(COMMANDS[called][0])
            module.add_arguments(subparsers[called])
        args = parser.parse_args(argv)
        return module.run(args) or 0
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # e.g. `fusedseq info | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except (ValueError, OSError, ImportError) as error:
        if traceback:
            raise
        print(f"fusedseq {called}: {sentence(error)}", file=sys.stderr)
        return 2
    except (RuntimeError, SystemError, MemoryError) as error:
        # torch's own exceptions are RuntimeErrors: only one that ran out of memory, or that is
        # already a sentence, is reported without its traceback.
        if os.environ.get("FUSEDSEQ_TRACEBACK") == "1" or not (why := _known(error)):
            raise
        print(f"fusedseq {called}: {why}", file=sys.stderr)
        return 1


def sentence(error: Exception) -> str:
    """The message of an exception in one line, without control characters."""
    from fusedseq.data.escapes import escaped

    return escaped(_message(error))


def _message(error: Exception) -> str:
    if isinstance(error, ModuleNotFoundError) and error.name:
        package = error.name.split(".")[0]
        if package != "fusedseq":
            return missing_packages(package)
    if isinstance(error, OSError) and error.strerror and error.filename is not None:
        return f"{error.filename}: {error.strerror}"
    return " ".join(str(error).split()).removeprefix("fusedseq: ") or type(error).__name__


def _known(error: BaseException) -> str:
    """A sentence for a failure that is not an error of the program; empty for any other."""
    from fusedseq.tasks.training.errors import TrainingError
    from fusedseq.tasks.training.failures import is_out_of_memory

    if isinstance(error, TrainingError):
        return sentence(error)
    return "out of memory" if is_out_of_memory(error) else ""


def missing_packages(package: str) -> str:
    """A sentence on a package that is missing, and on all others of PACKAGES that are.

    A package outside PACKAGES, such as a dependency of one, is named alone.
    """
    missing = [package]
    if package in PACKAGES:
        missing = [name for name in PACKAGES if name == package or find_spec(name) is None]
    if len(missing) == 1:
        return f"needs the Python package {package}, which is not installed: pip install {package}"
    return (
        f"needs the Python package {package}; of those that the tasks use, {len(missing)} are not "
        f"installed: pip install {' '.join(missing)}"
    )
