"""The report of `fusedseq grid`: table.csv, table.md and two plots of all finished runs."""

import csv
from pathlib import Path
from typing import Any

from fusedseq.tasks.experiments.documented import EXPERIMENTS
from fusedseq.tasks.runs.result import read_result
from fusedseq.tasks.studies import grid_plots
from fusedseq.tasks.studies.table import show, write_csv, write_markdown
from fusedseq.tasks.training.lock import LOCK, locked
from fusedseq.tasks.training.trainer import RESULT

NOTE = """The losses are those of the epoch with the lowest validation loss, whose weights are
evaluated; the source report has its losses after 10 epochs. BLEU is NLTK's sentence BLEU, averaged
over the test split, of greedy translations."""


def setting(settings: Any, key: str) -> Any:
    """The value of `section.key`."""
    section, name = key.split(".")
    return getattr(getattr(settings, section), name)


def write(task: str, grid: dict[str, Any], varying: list[str], out: Path) -> None:
    """Writes and prints the report, also of configurations that other processes trained.

    grid: {name: settings}    varying: the keys in which the configurations differ
    """
    curves: dict[str, list[dict]] = {}
    rows: list[dict[str, Any]] = []
    for name, settings in grid.items():
        curve = _curve(out / name / "epochs.csv")
        if curve:
            curves[name] = curve
        rows.append(
            {
                "name": name,
                **{key: setting(settings, key) for key in varying},
                **_metrics(out / name, curve),
                # The columns of the reported values are named as in earlier tables.
                **{
                    f"document {key}": value
                    for key, value in EXPERIMENTS[f"{task}/{name}"].metrics.items()
                },
            }
        )
    finished = sum("epochs" in row for row in rows)
    with locked(out / LOCK):
        write_csv(out / "table.csv", rows)
        write_markdown(out / "table.md", rows, NOTE)
        try:
            grid_plots.losses(out / "losses.png", curves)
            grid_plots.bars(out / "bleu.png", rows, varying)
        except ImportError as error:
            print(f"no plots: they need the Python package {error.name} (pip install {error.name})")
    show(rows, f"{task}: {finished} of {len(rows)} configurations are finished")
    print(f"in {out}: table.csv, table.md, losses.png, bleu.png", flush=True)


def _curve(path: Path) -> list[dict]:
    """The complete lines of epochs.csv; a running process may have written half of the last one."""
    if not path.exists():
        return []
    with path.open(newline="") as file:
        return [line for line in csv.DictReader(file) if None not in line.values()]


def _metrics(out: Path, curve: list[dict]) -> dict[str, Any]:
    """The metrics of a finished configuration; empty for others."""
    if not (out / RESULT).exists():
        return {}
    result = read_result(out / RESULT)
    best: dict = min(curve, key=lambda line: float(line["valid_loss"]), default={})
    return {
        "train loss": float(best["train_loss"]) if best else None,
        "valid loss": result["valid"].get("loss"),
        "test bleu": result.get("test", {}).get("bleu"),
        "test sacrebleu": result.get("test", {}).get("sacrebleu"),
        "epochs": result.get("epochs"),
        "seconds": result.get("seconds"),
    }
