"""Results of experiments: those that the package carries, and those of finished runs.

The package carries an excerpt of every result that the repository has under bench/results: the file
results.json beside this module. The programs of bench/ write it with `packed`, and a test checks
that it is up to date. In a result the key "row" is the name of its experiment.
"""

import csv
import io
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from fusedseq.tasks.training.files import read_json, read_text

CARRIED = Path(__file__).with_name("results.json")
# The keys of a result that the excerpt has, apart from its splits and parts of other keys.
KEYS = (
    "row",
    "label",
    "note",
    "command",
    "changes",
    "ended",
    "epochs",
    "steps",
    "seconds",
    "seconds per epoch",
    "parameters",
)

Results = dict[str, list[dict[str, Any]]]  # {experiment: [result, ...]}


def carried() -> Results:
    """The results that the package carries."""
    return by_experiment(json.loads(CARRIED.read_text(encoding="utf-8")))


def packed(results: Results) -> str:
    """The content of results.json: a line with the excerpt of each result."""
    lines = [json.dumps(excerpt(result)) for found in results.values() for result in found]
    return "[\n" + ",\n".join(lines) + "\n]\n"


def excerpt(result: dict[str, Any]) -> dict[str, Any]:
    """The part of a result that `fusedseq list` shows: metrics, budget, label and machine."""
    splits = {k: v for k, v in result.items() if k == "valid" or k.endswith("test")}
    training = result["settings"]["training"]
    last = result["validations"][-1:]
    return {
        **{key: result[key] for key in KEYS if key in result},
        "settings": {"training": {key: training[key] for key in ("epochs", "steps")}},
        **splits,
        "machine": {key: result["machine"][key] for key in ("cpu", "cores", "threads", "gpu")},
        "validations": [{"step": line["step"], "train_loss": line["train_loss"]} for line in last],
    }


def in_folder(folder: str | Path) -> Results:
    """The results stored as JSON files in a directory, in the order of the files' names."""
    return by_experiment(read_json(path) for path in sorted(Path(folder).glob("*.json")))


def under(folder: str | Path) -> Results:
    """The results of the finished runs in a directory, at any depth.

    Errors: FileNotFoundError where the directory does not exist
    """
    if not Path(folder).is_dir():
        raise FileNotFoundError(f"no such directory: {folder}")
    return by_experiment(of_run(path.parent) for path in sorted(Path(folder).rglob("result.json")))


def of_run(out: str | Path) -> dict[str, Any]:
    """The result in a run's directory, with its experiment ("row") and its validations."""
    # Imported here because the commands that list no runs need no torch.
    from fusedseq.tasks.runs.result import read_result

    found = read_result(Path(out) / "result.json")
    experiment = f"{found['task']}/{found['preset']}"
    return {"row": experiment} | found | {"validations": validations(out)}


def validations(out: str | Path) -> list[dict[str, float]]:
    """The lines of a run's epochs.csv as dicts of numbers."""
    table = Path(out) / "epochs.csv"
    if not table.exists():
        return []
    try:
        lines = csv.DictReader(io.StringIO(read_text(table)))
        return [{name: _number(text) for name, text in line.items()} for line in lines]
    except (csv.Error, TypeError, ValueError) as error:
        raise ValueError(f"{table} is damaged: {error}") from None


def _number(text: str) -> float:
    """An int where the text is one, else a float."""
    value = float(text)
    is_int = value.is_integer() and "." not in text and "e" not in text.lower()
    return int(value) if is_int else value


def by_experiment(results: Iterable[dict[str, Any]]) -> Results:
    """The results grouped by their experiment."""
    found: Results = {}
    for result in results:
        found.setdefault(result["row"], []).append(result)
    return found
