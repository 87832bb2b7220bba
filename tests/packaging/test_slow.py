"""`make test` exercises every operator and every task, although it leaves out the slow tests.

pytest collects what `make test` runs; the ids of these tests show what they exercise.
"""

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from fusedseq import reference
from fusedseq.tasks.catalog import TASKS

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def collected():
    """The ids of the tests that `make test` runs."""
    recipe = re.search(r"^test: .*\n\t\$\(PYTHON\) (.*)$", (ROOT / "Makefile").read_text(), re.M)[1]
    command = re.sub(r"\$\(or \$\(ARGS\),-n auto (.*)\)", r"\1", recipe)
    process = subprocess.run(
        [sys.executable, *shlex.split(command), "--collect-only", "-q"],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert process.returncode == 0, process.stdout + process.stderr
    return process.stdout


@pytest.mark.parametrize("element", ["float32", "float64", "bfloat16"])
@pytest.mark.parametrize("op", reference.__all__)
def test_every_operator_is_compared_with_its_oracle(collected, op, element):
    pattern = rf"^tests/operators/test_operators\.py::test_matches_the_oracle\[{element}-{op}-"
    assert re.search(pattern, collected, re.M)


@pytest.mark.parametrize("task", TASKS)
def test_an_experiment_of_every_task_trains(collected, task):
    assert re.search(rf"^tests/tasks/test_tasks\.py::\w*trains\[{task}/", collected, re.M)


def test_every_file_of_these_folders_is_run(collected):
    for folder in ("operators", "modules", "tasks"):
        for path in (ROOT / "tests" / folder).glob("test_*.py"):
            assert f"tests/{folder}/{path.name}::" in collected
