"""The curves of a run as pictures, from the tables that it wrote."""

import csv
from pathlib import Path

COUNTS = ("seconds", "tokens", "items")  # figures of a validation that no curve is wanted of


def plot(out):
    """Writes loss.png, train and valid, and NAME.png for each other figure of the validations; returns their paths.

    out: the directory of a run. Needs matplotlib: ImportError without it."""
    from matplotlib.figure import Figure

    curves, paths = _curves(Path(out) / "epochs.csv"), []
    for name, lines in curves.items():
        figure = Figure(figsize=(6, 4), layout="constrained")
        axes = figure.subplots()
        for label, (steps, values) in lines.items():
            axes.plot(steps, values, marker=".", label=label)
        axes.set(xlabel="step", ylabel=name)
        axes.grid(alpha=0.3)
        axes.legend()
        paths.append(Path(out) / f"{name}.png")
        figure.savefig(paths[-1], dpi=120)
    return paths


def _curves(table):
    """{"loss": {"train": (steps, values), "valid": ...}, ...} of the columns train_... and valid_..."""
    if not table.exists():
        return {}
    with table.open(newline="") as file:
        rows = list(csv.DictReader(file))
    curves: dict[str, dict] = {}
    for column in rows[0] if rows else ():
        split, _, name = column.partition("_")
        if split in ("train", "valid") and name not in (*COUNTS, "averaged"):
            lines = curves.setdefault(name, {})
            lines[split] = ([int(row["step"]) for row in rows], [float(row[column]) for row in rows])
    return curves
