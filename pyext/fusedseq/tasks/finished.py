"""Finished runs: those whose results the repository keeps, and those in a directory of runs."""

import csv
import json
from pathlib import Path

from fusedseq import machine

FOLDER = Path("bench/results/rows")  # in the repository: TASK-ROW[-LABEL].json


def committed(root=machine.REPOSITORY):
    """{row: [result, ...]} of the repository; empty where the package is not used from it."""
    return by_row(json.loads(path.read_text()) for path in sorted((root / FOLDER).glob("*.json")))


def under(folder):
    """{row: [result, ...]} of the runs in a directory, at any depth."""
    if not Path(folder).is_dir():
        raise FileNotFoundError(f"no such directory: {folder}")
    return by_row(of_run(path.parent) for path in sorted(Path(folder).rglob("result.json")))


def of_run(out):
    """The result of a run's directory, with its validations as a list of dicts, and the row that it is of."""
    found = json.loads((Path(out) / "result.json").read_text())
    return {"row": f"{found['task']}/{found['preset']}"} | found | {"validations": validations(out)}


def validations(out):
    """The lines of a run's epochs.csv as dicts of numbers."""
    table = Path(out) / "epochs.csv"
    if not table.exists():
        return []
    with table.open(newline="") as file:
        return [{name: _number(text) for name, text in line.items()} for line in csv.DictReader(file)]


def _number(text):
    value = float(text)
    return int(value) if value.is_integer() and "." not in text and "e" not in text.lower() else value


def by_row(results):
    found: dict[str, list] = {}
    for result in results:
        found.setdefault(result["row"], []).append(result)
    return found
