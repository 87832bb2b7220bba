"""Options that several commands share."""

import argparse
import re
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from fusedseq.tasks.catalog import OPERATORS, TASKS, TRANSLATION, task_operators
from fusedseq.tasks.training import one_of
from fusedseq.tasks.training.files import kind_of

DEVICE = r"(cpu|cuda)(:\d+)?"
# {operator set: what the help says of it}
DESCRIPTIONS = {
    "fused": "fused, the kernels of this package",
    "reference": "reference, the same in plain PyTorch",
    "torch_mha": "torch_mha, fused with the attention of torch.nn.MultiheadAttention, for "
    f"{' and '.join(TRANSLATION)} alone",
}


def add_common_arguments(
    parser: argparse.ArgumentParser,
    tasks: Iterable[str] = TASKS,
    operators: Iterable[str] = OPERATORS,
    default_operators: str = "fused, or the preset's own",
) -> None:
    """Adds TASK, --data, --ops and --device.

    tasks, operators: the values of TASK and of --ops
    default_operators: what is used without --ops, for the help
    """
    parser.add_argument("task", choices=[*tasks], help="the task")
    parser.add_argument(
        "--data",
        metavar="DIR",
        help="the data's directory, or 'synthetic' (default: $FUSEDSEQ_DATA)",
    )
    add_operators_argument(parser, operators, default=None, default_help=default_operators)
    add_device_argument(parser)


def add_operators_argument(
    parser: argparse.ArgumentParser,
    operators: Iterable[str] = OPERATORS,
    default: str | None = "fused",
    default_help: str = "fused",
) -> None:
    """Adds --ops. operators: its values    default_help: the default, for the help"""
    names = [*operators]
    descriptions = "; ".join(DESCRIPTIONS[name] for name in names)
    parser.add_argument(
        "--ops",
        choices=names,
        default=default,
        help=f"the operator set: {descriptions} (default: {default_help})",
    )


def check_operators(task: str, ops: str | None) -> None:
    """Raises ValueError where the operator set of --ops is not one of the task's."""
    known = task_operators(task)
    if ops is not None and ops not in known:
        raise ValueError(f"--ops must be {one_of(known)} for {task}, got {ops}")


def given(text: str) -> str:
    """The type of an option that must not be empty, as it is where a shell variable is not set."""
    if not text:
        raise argparse.ArgumentTypeError("must not be empty")
    return text


def directory(text: str) -> Path:
    """The type of --out, a directory: an empty text would be the current one."""
    return Path(given(text))


def add_device_argument(parser: argparse.ArgumentParser) -> None:
    """Adds --device."""
    parser.add_argument(
        "--device",
        default="cuda" if torch.cuda.is_available() else "cpu",
        help="cpu, cuda or cuda:N (default: %(default)s)",
    )


def add_set_argument(parser: argparse.ArgumentParser, help: str) -> None:
    """Adds --set KEY=VALUE, repeatable, as `args.assignments`."""
    parser.add_argument(
        "--set", action="append", default=[], metavar="KEY=VALUE", dest="assignments", help=help
    )


def add_seed_argument(parser: argparse.ArgumentParser, help: str, default: int | None = 0) -> None:
    """Adds --seed."""
    parser.add_argument("--seed", type=_seed, default=default, help=help)


def _seed(text: str) -> int:
    """The type of --seed: a number that seeds torch's generators."""
    seed = int(text)
    if not -(2**63) <= seed < 2**64:
        raise argparse.ArgumentTypeError(f"must be from -2^63 to 2^64 - 1, got {seed}")
    return seed


def split_names(text: str, known: Collection[str]) -> list[str]:
    """The names in --splits. Errors: ValueError for an unknown one"""
    names = text.split(",")
    if unknown := [name for name in names if name not in known]:
        raise ValueError(f"--splits: unknown split {unknown[0]!r}; known are {', '.join(known)}")
    return names


@contextmanager
def named_options(names: Iterable[str]) -> Iterator[None]:
    """Names the options in a ValueError of the block about arguments: "sample: top_p must be ..."
    becomes "--top-p must be ...".

    names: of the arguments, such as top_p; each is that of an option
    """
    try:
        yield
    except ValueError as error:
        known = "|".join(names)
        found = re.match(rf"(?:[a-z_ ]+: )?(?=(?:{known}) must be )", str(error))
        if not found:
            raise
        text = re.sub(
            rf"\b(?:{known})(?= must be | = )",
            lambda name: f"--{name[0].replace('_', '-')}",
            str(error)[found.end() :],
        )
        raise ValueError(text) from None


@contextmanager
def named_file(option: str) -> Iterator[None]:
    """Names the option in an OSError of the block that names a file."""
    try:
        yield
    except OSError as error:
        if error.filename is None:
            raise
        raise ValueError(f"{option}: {error.filename}: {error.strerror}") from error


def check_out(out: Path) -> None:
    """Raises ValueError where the directory of --out is something else."""
    if out.exists() and not out.is_dir():
        raise ValueError(f"--out must be a directory, got {kind_of(out.stat().st_mode)}: {out}")


def usable_device(name: str, argument: str = "--device") -> torch.device:
    """The device of --device, or of another argument.

    Errors: ValueError where it is neither a CPU nor a GPU, or no tensor can be allocated on it
    """
    if not re.fullmatch(DEVICE, str(name)):
        raise ValueError(f"{argument} must be cpu, cuda or cuda:N, got {name}")
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
        return device
    except (RuntimeError, AssertionError) as error:
        why = str(error).splitlines()[0]
    raise ValueError(f"{argument} {name} is not usable: {why}")
