"""The result files of experiments that the repository contains."""

from pathlib import Path

from fusedseq.tasks.experiments import results as package_results

ROOT = Path(__file__).parents[2]
FOLDER = Path("bench/results/experiments")  # in the repository: TASK-NAME[-LABEL].json
# The excerpt of these results that the package carries.
CARRIED = Path("pyext/fusedseq/tasks/experiments/results.json")


def committed(root=ROOT):
    """Returns {experiment: [result, ...]}."""
    return package_results.in_folder(root / FOLDER)


def name_of(result):
    """Returns the name of a result's file, without its suffix."""
    return "-".join(filter(None, [result["row"].replace("/", "-"), result.get("label")]))


def is_smoke_run(result):
    """Returns whether the run ended before its first pass over the training data."""
    return result["epochs"] < 1
