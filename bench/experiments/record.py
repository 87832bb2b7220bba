"""Copies the result of a finished run into the repository, without any path of the machine."""

import csv
import json
import re
from pathlib import Path

from fusedseq import machine
from fusedseq.tasks.experiments import results as package_results
from fusedseq.tasks.experiments.documented import EXPERIMENTS
from fusedseq.tasks.runs.result import changes, command

from bench.experiments.results import name_of

GREEDY = "test-greedy.csv"  # the table that a run of a translation task writes
SAMPLES = 8  # translations that a result has
SAMPLE = ("source", "reference", "hypothesis")
DIRECTORIES = re.compile(r"(?<!\w)(?:~|\.\.?)?/(?:[^\s,]*/)?")  # the directories of a path


def add(args):
    result = completed(package_results.of_run(args.run), args)
    if result["row"] not in EXPERIMENTS:
        raise ValueError(f"--experiment: no such experiment: {result['row']}")
    if args.eval:
        result = with_evaluation(result, json.loads(args.eval.read_text()))
    if samples := of_table(args.translations or args.run / GREEDY):
        result["samples"] = samples
    path = args.results / f"{name_of(result)}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(result, indent=1) + "\n")
    print(f"written: {path.name}")


def of_table(path):
    """Returns samples at equal distances from a CSV table of translations; [] without that file.

    Sentences with a slash are left out, since they could be taken for paths.
    """
    if not Path(path).exists():
        return []
    with Path(path).open(newline="") as file:
        table = [{name: line[name] for name in SAMPLE} for line in csv.DictReader(file)]
    lines = [line for line in table if not any("/" in text for text in line.values())]
    count = min(SAMPLES, len(lines))
    return [lines[i * len(lines) // count] for i in range(count)]


def completed(result, args):
    """Returns the result with the experiment, label and note of `args`, and without paths."""
    named = {"row": args.experiment, "label": args.label, "note": args.note}
    result = without_paths(result | {key: value for key, value in named.items() if value})
    if "command" in result:
        return result
    # Early runs did not record their command and machine; they ran on the machine that records
    # them.
    return result | {
        "command": command(result),
        "changes": changes(result),
        "data": {"name": args.data} if args.data else None,
        **machine.facts("cpu"),
    }


def with_evaluation(result, metrics):
    """Returns the result with more metrics, {split: metrics}, and the command that made them."""
    experiment = EXPERIMENTS[result["row"]]
    more = {split: result.get(split, {}) | part for split, part in metrics.items()}
    if not experiment.preset:
        more["command"] = f"{result['command']}; {experiment.command}"
    return result | more


def without_paths(value):
    """Returns JSON data in which every path is reduced to its last part."""
    if isinstance(value, dict):
        return {key: without_paths(item) for key, item in value.items()}
    if isinstance(value, list):
        return [without_paths(item) for item in value]
    return DIRECTORIES.sub("", value) if isinstance(value, str) else value
