"""Options that several commands share."""

import argparse
from collections.abc import Collection, Iterable
from pathlib import Path

import torch

from fusedseq.tasks.catalog import OPERATORS, TASKS
from fusedseq.tasks.training.files import kind_of

DEVICES = ("cpu", "cuda")


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
    parser.add_argument(
        "--ops", choices=[*operators], help=f"the operator set (default: {default_operators})"
    )
    add_device_argument(parser)


def add_operators_argument(parser: argparse.ArgumentParser) -> None:
    """Adds --ops for a command without presets."""
    parser.add_argument(
        "--ops", choices=OPERATORS, default="fused", help="the operator set (default: fused)"
    )


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


def check_out(out: Path) -> None:
    """Raises ValueError where the directory of --out is something else."""
    if out.exists() and not out.is_dir():
        raise ValueError(f"--out must be a directory, got {kind_of(out.stat().st_mode)}: {out}")


def usable_device(name: str, argument: str = "--device") -> torch.device:
    """The device of --device, or of another argument.

    Errors: ValueError where it is neither a CPU nor a GPU, or no tensor can be allocated on it
    """
    try:
        device = torch.device(name)
        if device.type in DEVICES:
            torch.empty(0, device=device)
            return device
        why = "it must be cpu, cuda or cuda:N"
    except (RuntimeError, AssertionError) as error:
        why = str(error).splitlines()[0]
    raise ValueError(f"{argument} {name} is not usable: {why}")
