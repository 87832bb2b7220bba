"""Several processes train as one, with torchrun, gloo and DDP, and end cleanly."""

import itertools
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from fusedseq import cli
from fusedseq.tasks.catalog import TASKS, task_module
from fusedseq.tasks.training import CheckpointError, Trainer, TrainingSettings, load_checkpoint
from fusedseq.tasks.training.processes import Processes

from tests.support.toy_task import Toy
from tests.tasks.test_tasks import made
from tests.tasks.test_trainer import column

pytestmark = pytest.mark.cpu
PROGRAM = Path(__file__).parents[1] / "support/train_toys.py"


def torchrun(*command, code=0):
    """Runs two processes on this machine; returns their output."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    done = subprocess.run(
        [*launcher, *map(str, command)],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert done.returncode == code, done.stdout
    return done.stdout


def toys(folder, runs):
    """How the runs ended in each of two processes."""
    torchrun(PROGRAM, folder, json.dumps(runs))
    ranks = [json.loads((folder / f"{rank}.json").read_text()) for rank in range(2)]
    # A gloo thread that outlives its process group may abort the process with SIGABRT.
    assert [rank["left"] for rank in ranks] == [[], []]
    return [rank["ends"] for rank in ranks]


def test_two_processes_have_the_result_of_one(tmp_path):
    """Also with parts of uneven size, with an empty part, and with one batch in the last step."""
    runs = {  # with 48 points
        "even": {"task": {"batch": 8}, "settings": {"clip": 0.3, "stop_after": 9}},
        "accumulated": {
            "task": {"batch": 10},
            "settings": {"accumulate": 4, "averaging": "nt-asgd", "nonmono": 1},
        },
        "empty part": {"task": {"batch": 47}, "settings": {"optimizer": "adam"}},
        "compiled": {"task": {"batch": 8}, "settings": {}, "compile": "aot_eager"},
    }
    for run in runs.values():
        run["settings"] = {"epochs": 3, "lr": 0.1, **run["settings"]}
        run["task"]["double"] = True
    for name, run in runs.items():
        torch.manual_seed(0)
        Trainer(
            Toy(**run["task"]), TrainingSettings(**run["settings"]), tmp_path / "one" / name
        ).fit()
    first, second = toys(tmp_path, [{"name": f"two/{name}", **run} for name, run in runs.items()])
    assert first == second
    for name in runs:
        one, two = (tmp_path / n / name for n in ("one", "two"))
        for name in ("step", "points", "loss", "lr", "grad_norm"):
            assert column(two, name) == pytest.approx(column(one, name), rel=1e-12)
        for name in ("step", "train_loss", "valid_loss", "valid_accuracy"):
            expected = pytest.approx(column(one, name, "epochs"), rel=1e-12)
            assert column(two, name, "epochs") == expected
        states = [load_checkpoint(run / "last.safetensors") for run in (one, two)]
        for key, weight in states[0]["model"].items():
            torch.testing.assert_close(states[1]["model"][key], weight, rtol=1e-12, atol=1e-14)


def test_two_processes_resume_stop_and_fail_alike(tmp_path):
    settings, task = {"accumulate": 2, "lr": 0.1, "save_steps": 1, "epochs": 2}, {"dropout": 0.3}
    first, second = toys(
        tmp_path,
        [
            {"name": "whole", "settings": settings, "task": task},
            # A signal to the second of the two processes.
            {"name": "parts", "settings": settings, "task": task, "trouble": (1, 7, "signal")},
            {"name": "parts", "settings": settings, "task": task, "resume": True},
            {"name": "nan", "settings": settings, "task": task, "trouble": (1, 9, "nan")},
        ],
    )
    assert first == second
    assert first[:3] == [["epochs", 6], ["interrupted", 4], ["epochs", 6]]
    assert first[3].startswith("loss nan at step 5 (epoch 2")
    assert column(tmp_path / "parts", "loss") == column(tmp_path / "whole", "loss")
    whole, parts, saved = (
        load_checkpoint(tmp_path / n / "last.safetensors") for n in ("whole", "parts", "nan")
    )
    assert all(torch.equal(parts["model"][name], weight) for name, weight in whole["model"].items())
    # Each process draws its own dropout masks.
    assert not torch.equal(*(rank["rng"]["cpu"] for rank in whole["ranks"]))
    assert saved["position"]["step"] == 4
    with pytest.raises(CheckpointError, match="it was saved by 2 processes, got 1"):
        Trainer(Toy(dropout=0.3), TrainingSettings(), tmp_path / "whole").resume()


class Alone(Processes):
    """One of several processes, in which the others always agree with it."""

    def sum(self, number):
        return number

    def from_first(self, function):
        return function()

    def gather(self, state):
        return [state] * self.count


def started_run(folder, seed, rank, state=None):
    """A Trainer in process `rank` of four that has taken no step yet, from the seed or a state."""
    torch.manual_seed(seed)
    trainer = Trainer(
        Toy(), TrainingSettings(lr=0.1, steps=0, epochs=1), folder, processes=Alone(rank, 4)
    )
    trainer.gradient.processes = Processes()  # no step, and so no gradient, is shared
    torch.manual_seed(seed)  # because a Toy seeds the generator for its weights
    if state is not None:
        trainer.load_state_dict(state)
    assert trainer.fit() == "steps"
    return trainer


def test_ranks_of_neighbouring_seeds_draw_different_numbers(tmp_path):
    """No window of the numbers of one process is found in those of another."""
    places = {}  # {a pair of successive numbers: the process that draws it}
    for seed in range(9):
        for rank in range(4):
            started_run(tmp_path / str(seed), seed, rank)
            numbers = torch.randint(2**63 - 1, (100,)).tolist()
            for pair in itertools.pairwise(numbers):
                assert pair not in places, f"{(seed, rank)} draws numbers of {places[pair]}"
                places[pair] = seed, rank


def test_a_run_resumed_at_its_first_step_draws_the_same_numbers(tmp_path):
    """In every process: a checkpoint of step 0 has the state of a generator already seeded."""
    for rank in range(4):
        trainer = started_run(tmp_path, 5, rank)
        state, numbers = trainer.state_dict(), torch.rand(3)
        started_run(tmp_path, 5, rank, state)
        assert torch.equal(torch.rand(3), numbers)


def test_a_failing_process_ends_the_other(tmp_path):
    run = {
        "name": "run",
        "settings": {"lr": 0.1, "save_steps": 1},
        "task": {},
        "trouble": (1, 5, "memory"),
    }
    (first,), (second,) = toys(tmp_path, [run])
    assert second.startswith("out of memory at step 5")
    assert first.startswith("another process of this run ended, at step 5")
    assert load_checkpoint(tmp_path / "run" / "last.safetensors")["position"]["step"] == 4


def test_torchrun_of_the_command_line_has_the_losses_of_one_process(tmp_path):
    # A batch of 39 is 20 columns for one process and 19 for the other.
    sets = ("embedding=8", "hidden=8", "layers=1", "batch=39", "bptt=20", "lr=1")
    options = ["--preset", "lstm", "--data", "synthetic", "--ops", "reference"]
    options += ["--steps", "12", "--skip-test"]
    options += [word for change in sets for word in ("--set", change)]
    assert cli.main(["train", "ptb", "--out", str(tmp_path / "one"), *options]) == 0
    output = torchrun("-m", "fusedseq", "train", "ptb", "--out", tmp_path / "two", *options)
    assert output.count("ended (steps) at step 12") == 1
    assert column(tmp_path / "two", "tokens") == column(tmp_path / "one", "tokens")
    assert column(tmp_path / "two", "loss") == pytest.approx(
        column(tmp_path / "one", "loss"), rel=1e-5
    )
    assert (tmp_path / "two/result.json").is_file()
    assert {path.name for path in (tmp_path / "two").iterdir()} == {
        path.name for path in (tmp_path / "one").iterdir()
    }


@pytest.mark.parametrize("task", TASKS)
def test_the_parts_of_a_batch_together_are_the_batch(task):
    """The losses of three parts, weighted by their items, give that of the batch (no dropout)."""
    one, _ = made(task, task_module(task).DEFAULT_PRESET, ops="reference", changes=["batch=25"])
    one.model.eval()

    def losses(part, parts):
        batches = one.start_epoch(0, part, parts)
        steps = [one.loss(batches[i]) for i in (*range(2), len(batches) - 1)]
        return torch.tensor([[step.loss.item() * step.items, step.items] for step in steps])

    parts = [losses(part, 3) for part in range(3)]
    torch.testing.assert_close(sum(parts), losses(0, 1), rtol=1e-5, atol=0)
    assert not torch.equal(parts[0], parts[2])


@pytest.mark.parametrize("task", [name for name in TASKS if name != "ptb"])
def test_an_empty_part_has_no_items(task):
    one, _ = made(task, task_module(task).DEFAULT_PRESET, changes=["batch=1"])
    steps = [one.loss(one.start_epoch(0, part, 2)[0]) for part in range(2)]
    assert steps[0].items > 0 == steps[1].items
    assert steps[1].objective.isfinite()


def test_more_processes_than_columns_are_an_error():
    one, _ = made("ptb", "lstm", changes=["batch=2"])
    with pytest.raises(
        ValueError, match=r"data\.batch must be at least the number of processes = 3, got 2"
    ):
        one.start_epoch(0, 0, 3)
