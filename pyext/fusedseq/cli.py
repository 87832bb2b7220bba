"""`fusedseq COMMAND ...`: every command is a module with `add_arguments(parser)` and `run(args)`, whose result is the
exit code (None: 0). Exit code 2 and one sentence: the caller's mistake, a missing file or package."""

import argparse
import importlib
import os
import sys

COMMANDS = {  # name: (module, summary); a module is imported where its command is called
    "info": ("fusedseq.info", "what is built and found here, and whether every operator agrees with its oracle"),
    "bench": ("fusedseq.bench_cli", "times the fused operators against plain PyTorch"),
    "train": ("fusedseq.tasks.train", "train a documented configuration, or resume one"),
    "tune": ("fusedseq.tasks.studies.tune", "search the best settings by many short runs, shared among processes"),
    "grid": ("fusedseq.tasks.studies.grid", "train all configurations of a documented table"),
    "data": ("fusedseq.data.report", "the statistics of a task's data: sentences, words, most frequent, unknown"),
    "list": ("fusedseq.tasks.listing", "every documented row: its figures, ours, and the command that runs it"),
    "ensemble": ("fusedseq.tasks.train_ensemble", "train several word predictors and evaluate their vote and average"),
    "eval": ("fusedseq.tasks.evaluate", "the figures of a trained model"),
    "vectors": ("fusedseq.tasks.vectors", "a trained model's word vectors: as a word2vec file, or a word's neighbours"),
    "translate": ("fusedseq.tasks.translate", "translate lines by a trained model"),
    "generate": ("fusedseq.tasks.generate", "write text by a trained language model"),
}


class Parser(argparse.ArgumentParser):
    def error(self, message):
        self.exit(2, f"{self.prog}: {message} (see {self.prog} --help)\n")


def main(argv=None):
    argv = sys.argv[1:] if argv is None else argv
    parser = Parser(
        prog="fusedseq",
        description="Fused operators for classic sequence models.",
        epilog="With FUSEDSEQ_TRACEBACK=1 in the environment, errors show where they come from.",
    )
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    subparsers = {n: commands.add_parser(n, help=about, description=about) for n, (_, about) in COMMANDS.items()}
    called = next((word for word in argv if not word.startswith("-")), None)
    try:
        if called in COMMANDS:
            module = importlib.import_module(COMMANDS[called][0])
            module.add_arguments(subparsers[called])
        args = parser.parse_args(argv)
        return module.run(args) or 0
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # `fusedseq info | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except (ValueError, OSError, ImportError) as error:
        if os.environ.get("FUSEDSEQ_TRACEBACK") == "1":
            raise
        print(f"fusedseq {called}: {sentence(error)}", file=sys.stderr)
        return 2


def sentence(error):
    """The error in one line."""
    if isinstance(error, ModuleNotFoundError) and error.name and not error.name.startswith("fusedseq"):
        package = error.name.split(".")[0]
        return f"needs the Python package {package}, which is not installed: pip install {package}"
    if isinstance(error, OSError) and error.strerror and error.filename is not None:
        return f"{error.filename}: {error.strerror}"
    return " ".join(str(error).split()).removeprefix("fusedseq: ") or type(error).__name__
