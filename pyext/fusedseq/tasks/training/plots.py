"""The training curves of a run as PNG files, drawn from its epochs.csv and steps.csv."""

import csv
import io
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from fusedseq.tasks.training.files import read_text, replaced

# Columns of a validation that are not drawn.
NOT_DRAWN = ("seconds", "tokens", "items", "averaged")
Curves = TypeVar("Curves")
Lines = dict[str, tuple[list[int], list[float]]]  # {"train" or "valid": (steps, values)}


def plot(out: str | Path) -> list[Path]:
    """Writes loss.png and NAME.png for every other validation metric; returns their paths.

    Each picture shows the training and the validation curve where both exist. A metric that never
    changes has no picture. The training loss of a run with fewer than two validations is that of
    its steps.
    out: the directory of a run
    Errors: ImportError without matplotlib
    """
    from matplotlib.figure import Figure

    out, paths = Path(out), []
    for name, lines in _curves(out).items():
        figure = Figure(figsize=(6, 4), layout="constrained")
        axes = figure.subplots()
        for label, (steps, values) in lines.items():
            axes.plot(steps, values, marker="." if len(steps) < 100 else "", label=label)
        axes.set(xlabel="step", ylabel=name, title=f"{name} of {_name(out)}")
        axes.grid(alpha=0.3)
        axes.legend()
        paths.append(out / f"{name}.png")
        with replaced(paths[-1], "wb") as file:
            figure.savefig(file, format="png", dpi=120)
    return paths


def _name(out: Path) -> str:
    """The run's name: that of its directory and of the one above, e.g. ptb/mogrifier-awd-0."""
    return "/".join(out.resolve().parts[-2:]).lstrip("/")


def _curves(out: Path) -> dict[str, Lines]:
    """{metric: its Lines} from the columns SPLIT_METRIC of epochs.csv, and from steps.csv."""
    curves = _read(out / "epochs.csv", _of_validations) or {}
    steps = _read(out / "steps.csv", _of_steps)
    if steps and all(len(values) < 2 for _, values in curves.get("loss", {}).values()):
        valid = {k: v for k, v in curves.get("loss", {}).items() if k == "valid"}
        curves["loss"] = {"train": steps, **valid}
    return {name: lines for name, lines in curves.items() if _varies(lines)}


def _of_validations(rows: list[dict[str, str]]) -> dict[str, Lines]:
    curves: dict[str, Lines] = {}
    for column in rows[0]:
        split, _, name = column.partition("_")
        if split in ("train", "valid") and name not in NOT_DRAWN:
            values = [float(row[column]) for row in rows]
            curves.setdefault(name, {})[split] = ([int(row["step"]) for row in rows], values)
    return curves


def _of_steps(rows: list[dict[str, str]]) -> tuple[list[int], list[float]]:
    return [int(row["step"]) for row in rows], [float(row["loss"]) for row in rows]


def _read(table: Path, parse: Callable[[list[dict[str, str]]], Curves]) -> Curves | None:
    """What `parse` makes of the lines of a CSV file; None where it has none or does not exist."""
    if not table.exists():
        return None
    text = read_text(table)
    try:
        rows = [*csv.DictReader(io.StringIO(text, newline=""))]
        return parse(rows) if rows else None
    except (csv.Error, KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{table} is damaged: {error!r:.100}") from None


def _varies(lines: Lines) -> bool:
    """Whether a curve of a metric has more than one value."""
    return any(len({*values}) > 1 for _, values in lines.values())
