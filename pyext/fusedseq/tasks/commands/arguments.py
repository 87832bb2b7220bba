"""Options that several commands share."""

import argparse
from collections.abc import Iterable

import torch

from fusedseq.tasks.catalog import OPERATORS, TASKS


def add_common_arguments(
    parser: argparse.ArgumentParser,
    tasks: Iterable[str] = TASKS,
    operators: Iterable[str] = OPERATORS,
) -> None:
    """Adds TASK, --data, --ops and --device.

    tasks, operators: the values of TASK and of --ops
    """
    parser.add_argument("task", choices=[*tasks], help="the task")
    parser.add_argument(
        "--data",
        metavar="DIR",
        help="the data's directory, or 'synthetic' (default: $FUSEDSEQ_DATA)",
    )
    parser.add_argument(
        "--ops", choices=[*operators], help="the operator set (default: fused, or the preset's own)"
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


def usable_device(name: str) -> torch.device:
    """The device of --device. Errors: ValueError where no tensor can be allocated on it"""
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        raise ValueError(f"--device {name} is not usable: {str(error).splitlines()[0]}") from None
    return device
