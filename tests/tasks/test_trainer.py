"""The trainer on a minimal task: schedules, accumulation, bf16, failures, torch.compile."""

import csv
import errno
import io
import math
import os
import subprocess
import sys
import types

import pytest
import torch
from fusedseq.tasks.training import (
    Trainer,
    TrainingError,
    TrainingSettings,
    load_checkpoint,
    progress,
)
from fusedseq.tasks.training import checkpoint as checkpoints
from fusedseq.tasks.training import log as logs
from fusedseq.tasks.training.learning_rate import lr_factor
from fusedseq.tasks.training.log import Log
from fusedseq.tasks.training.plots import _curves as curves
from fusedseq.tasks.training.plots import plot

from tests.support.toy_task import Toy


def trainer(out, task=None, **changes):
    torch.manual_seed(0)
    settings = {"epochs": 3, "lr": 0.1, "save_steps": 4, **changes}
    return Trainer(task or Toy(), TrainingSettings(**settings), out)


def column(out, name, table="steps"):
    with (out / f"{table}.csv").open() as file:
        return [float(row[name]) if row[name] else None for row in csv.DictReader(file)]


def weights(run):
    return torch.cat([p.detach().flatten() for p in run.task.model.parameters()])


# Learning rates.


def factors(steps, **settings):
    return [lr_factor(TrainingSettings(**settings), step) for step in range(steps)]


def test_the_warm_up_is_linear_and_then_constant():
    assert factors(6, warmup_steps=4) == [0.25, 0.5, 0.75, 1, 1, 1]


def test_linear_falls_to_zero_and_stays_there():
    assert factors(8, lr_schedule="linear", warmup_steps=2, decay_steps=6) == [
        0.5,
        1,
        0.75,
        0.5,
        0.25,
        0,
        0,
        0,
    ]


def test_cosine_equals_that_of_torch():
    settings = {"lr_schedule": "cosine", "warmup_steps": 2, "decay_steps": 10}
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=8)
    wanted = [0.5]
    for _ in range(9):
        wanted.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        schedule.step()
    assert factors(13, **settings) == pytest.approx([*wanted, 0, 0, 0])


def test_inverse_sqrt_equals_the_published_schedule():
    model, warmup = 512, 10
    published = [model**-0.5 * min(step**-0.5, step * warmup**-1.5) for step in range(1, 50)]
    peak = (model * warmup) ** -0.5
    found = [peak * f for f in factors(49, lr_schedule="inverse-sqrt", warmup_steps=warmup)]
    assert found == pytest.approx(published)


def test_annealing_multiplies_the_schedule(tmp_path, monkeypatch):
    task = Toy()
    monkeypatch.setattr(task, "validate", lambda: {"loss": 1.0})  # never improves after the first
    run = trainer(tmp_path, task, warmup_steps=4, anneal_after=1, anneal_factor=0.5)
    run.fit()
    assert column(tmp_path, "lr") == pytest.approx([0.025, 0.05, 0.075, *[0.1] * 9, *[0.05] * 6])


# Exact resume.

KINDS = {
    "warmup": {"warmup_steps": 7},
    "linear": {"lr_schedule": "linear", "warmup_steps": 3, "decay_steps": 15},
    "cosine": {"lr_schedule": "cosine", "warmup_steps": 3, "decay_steps": 15},
    "inverse-sqrt": {
        "lr_schedule": "inverse-sqrt",
        "warmup_steps": 5,
        "optimizer": "adam",
        "lr": 0.01,
    },
    "plateau": {"lr": 3.0, "anneal_after": 1, "stop_after": 9},
    "accumulated": {"accumulate": 4, "clip": 0.1},
    "tail": {"averaging": "tail", "tail_from": 1},
    "nt-asgd": {"averaging": "nt-asgd", "nonmono": 1, "lr": 3.0},
    "bf16": {"precision": "bf16"},
    "rarely logged": {"log_steps": 3, "eval_steps": 4},
}


@pytest.mark.parametrize("kind", KINDS)
def test_every_schedule_resumes_bit_for_bit_at_any_step(tmp_path, kind):
    settings = {"epochs": 5, "save_steps": 1, **KINDS[kind]}
    whole = trainer(tmp_path / "whole", Toy(dropout=0.3), **settings)
    whole.fit()
    for steps in range(1, whole.step + 1):  # a new trainer for each step
        part = trainer(tmp_path / "parts", Toy(dropout=0.3), **settings, steps=steps)
        if steps > 1:
            torch.manual_seed(99)
            part.resume()
        part.fit()
    for name in ("step", "loss", "lr", "grad_norm"):
        assert column(tmp_path / "parts", name) == column(tmp_path / "whole", name)
    for name in ("step", "train_loss", "valid_loss"):
        wanted = column(tmp_path / "whole", name, "epochs")
        assert (
            column(tmp_path / "parts", name, "epochs")
            == wanted[: len(column(tmp_path / "parts", name, "epochs"))]
        )
    assert torch.equal(weights(part), weights(whole))
    assert part.task.seen == whole.task.seen


def test_a_run_killed_in_its_last_validation_makes_it_up(tmp_path, monkeypatch):
    """Its limit of steps is at the end of an epoch, where a checkpoint is due too."""
    settings = {"epochs": 2, "save_steps": 6, "steps": 12}
    whole = trainer(tmp_path / "whole", Toy(dropout=0.3), **settings)
    assert whole.fit() in ("epochs", "steps")
    assert whole.step == 12
    killed = trainer(tmp_path / "killed", Toy(dropout=0.3), **settings)
    validate = killed.validate
    monkeypatch.setattr(killed, "validate", lambda: validate() if killed.step < 12 else 1 / 0)
    with pytest.raises(ZeroDivisionError):
        killed.fit()
    again = trainer(tmp_path / "killed", Toy(dropout=0.3), **settings)
    again.resume()
    again.fit()
    for name in ("step", "train_loss", "valid_loss"):
        found = (column(tmp_path / run, name, "epochs") for run in ("killed", "whole"))
        assert len({*map(tuple, found)}) == 1
    assert torch.equal(weights(again), weights(whole))
    assert again.finish() == whole.finish()


@pytest.mark.parametrize("clip", [None, 1.0])
def test_the_norm_is_computed_only_to_clip_or_to_log(tmp_path, clip):
    trainer(tmp_path / "some", log_steps=3, clip=clip, epochs=2).fit()
    trainer(tmp_path / "all", clip=clip, epochs=2).fit()
    some, every = (column(tmp_path / name, "grad_norm") for name in ("some", "all"))
    assert some == [norm if clip or step % 3 == 0 else None for step, norm in enumerate(every, 1)]
    assert column(tmp_path / "some", "loss") == column(tmp_path / "all", "loss")


def test_nt_asgd_has_the_norm_also_without_clipping(tmp_path):
    for averaging in ("none", "nt-asgd"):
        trainer(tmp_path / averaging, averaging=averaging, epochs=1).fit()
    plain, averaged = (column(tmp_path / name, "grad_norm") for name in ("none", "nt-asgd"))
    assert averaged == pytest.approx(plain)


# What is logged and stored.


def test_the_training_loss_is_the_mean_over_the_points_since_the_last_validation(tmp_path):
    trainer(tmp_path, epochs=2, eval_steps=4).fit()
    pairs = [*zip(column(tmp_path, "loss"), column(tmp_path, "points"), strict=True)]
    means = [
        sum(loss * points for loss, points in part) / sum(points for _, points in part)
        for part in (pairs[:4], pairs[4:8], pairs[8:])
    ]
    assert len(pairs) == 12
    assert column(tmp_path, "train_loss", "epochs") == pytest.approx(means)


class Scaled(Toy):
    """Batch number n of an epoch has the factor n / 2 of the learning rate."""

    def loss(self, batch):
        return super().loss(batch)._replace(lr_scale=self.seen / 2)


@pytest.mark.parametrize(
    ("accumulate", "scales"), [(1, [0.5, 1, 1.5, 2, 2.5, 3]), (4, [1.25, 2.75])]
)
def test_a_step_has_the_mean_factor_of_its_batches(tmp_path, accumulate, scales):
    trainer(tmp_path, Scaled(), accumulate=accumulate, epochs=1).fit()
    assert column(tmp_path, "lr") == pytest.approx([0.1 * scale for scale in scales])


def test_the_seconds_of_training_go_on_after_a_resume(tmp_path):
    run, again = trainer(tmp_path, steps=4), trainer(tmp_path)
    run.fit()
    again.resume()
    assert again.seconds == run.seconds > 0


def test_the_time_of_a_step_is_counted_once(tmp_path, monkeypatch):
    clock = types.SimpleNamespace(now=0.0, perf_counter=lambda: clock.now)
    monkeypatch.setattr(logs, "time", clock)
    with Log(tmp_path, "points", 0) as log:
        seconds = []
        for step in (1, 2, 3):
            clock.now += step
            seconds.append(log.train([(step, 0, 0.5, 0.1, None, 8)]))
    assert seconds == [1, 2, 3]
    assert column(tmp_path, "points_per_s") == [8, 4, 2.7]


@pytest.mark.parametrize("averaging", ["tail", "nt-asgd"])
def test_the_best_weights_are_the_average_that_was_validated(tmp_path, averaging):
    run = trainer(tmp_path, averaging=averaging, tail_from=1)
    if averaging == "nt-asgd":
        run.optimization.start_averaging()
    run.fit()
    assert column(tmp_path, "train_averaged", "epochs")[-1] == 1
    assert run.finish() == run.validate()


# Numbers that are not finite.


def test_weights_that_are_not_finite_do_not_replace_a_checkpoint(tmp_path):
    """A checkpoint with them could not be loaded."""
    run = trainer(tmp_path, lr=1e39, save_steps=1)
    with pytest.raises(TrainingError, match=r"0\.weight is not finite after step 1: .* lower lr"):
        run.fit()
    before = trainer(tmp_path, save_steps=1)
    before.resume()
    assert before.step == 0
    assert weights(before).isfinite().all()


def test_a_run_that_ends_with_a_loss_that_is_not_finite_has_no_result(tmp_path, monkeypatch):
    task = Toy()
    monkeypatch.setattr(task, "validate", lambda: {"loss": math.nan})
    run = trainer(tmp_path, task, steps=1)
    assert run.fit() == "steps"
    with pytest.raises(TrainingError, match="validation loss nan at step 1"):
        run.finish()
    assert not (tmp_path / "best.safetensors").exists()


# Accumulation, bf16.


@pytest.mark.parametrize("accumulate", [2, 3, 6])
@pytest.mark.parametrize(
    "kind", [{}, {"averaging": "nt-asgd"}, {"optimizer": "adam"}], ids=["sgd", "nt-asgd", "adam"]
)
def test_accumulated_batches_are_one_large_batch(tmp_path, accumulate, kind):
    """Also where their items differ, and with clipping."""
    kind = {**kind, "clip": 0.2, "lr": 0.05, "weight_decay": 0.01}
    small = trainer(tmp_path / "small", Toy(double=True), accumulate=accumulate, **kind)
    large = trainer(tmp_path / "large", Toy(batch=8 * accumulate, double=True), **kind)
    small.fit()
    large.fit()
    for name in ("points", "loss", "grad_norm"):
        assert column(tmp_path / "small", name) == pytest.approx(
            column(tmp_path / "large", name), rel=1e-12
        )
    torch.testing.assert_close(weights(small), weights(large), rtol=1e-10, atol=1e-12)


def test_the_last_step_of_an_epoch_has_the_remaining_batches(tmp_path):
    run = trainer(tmp_path, accumulate=4, epochs=2)
    run.fit()
    assert run.step == 4  # 4 and 2 batches, twice
    assert column(tmp_path, "step", "epochs") == [2, 4]


def test_bf16_applies_to_steps_and_not_to_weights_or_validation(tmp_path):
    runs = {}
    for precision in ("fp32", "bf16"):
        task = Toy()
        seen = []
        task.model[0].register_forward_hook(
            lambda module, args, y, seen=seen: seen.append((module.training, y.dtype))
        )
        runs[precision] = trainer(tmp_path / precision, task, precision=precision)
        runs[precision].fit()
        dtype = torch.bfloat16 if precision == "bf16" else torch.float32
        assert {*seen} == {(True, dtype), (False, torch.float32)}
        assert all(p.dtype == torch.float32 for p in task.model.parameters())
    found, wanted = (column(tmp_path / precision, "loss") for precision in ("bf16", "fp32"))
    assert found == pytest.approx(wanted, rel=0.02)
    assert found != wanted


def test_early_stopping(tmp_path, monkeypatch):
    task = Toy()
    losses = iter([3.0, 2.0, 2.5, 2.1, 9.0])
    monkeypatch.setattr(task, "validate", lambda: {"loss": next(losses)})
    run = trainer(tmp_path, task, epochs=50, stop_after=2)
    assert run.fit() == "early stop"
    assert run.epoch == 4
    assert load_checkpoint(tmp_path / "best.safetensors")["metrics"] == {"loss": 2.0}


# Failures that stop a run.


def broken(task, at, error):
    """Changes `task` so that its loss raises `error`, or has that value, at call `at`."""
    loss, calls = task.loss, []

    def breaks(batch):
        calls.append(1)
        if len(calls) != at:
            return loss(batch)
        if isinstance(error, Exception):
            raise error
        return loss(batch)._replace(loss=torch.tensor(error))

    task.loss = breaks
    return task


OUT_OF_MEMORY = [
    torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB"),
    RuntimeError(
        "[enforce fail at alloc_cpu.cpp] DefaultCPUAllocator: can't allocate memory: you tried to "
        "allocate"
    ),
    MemoryError(),
]


@pytest.mark.parametrize("error", OUT_OF_MEMORY, ids=lambda error: type(error).__name__)
def test_out_of_memory_is_one_sentence_and_the_run_can_be_resumed(tmp_path, error):
    message = (
        r"out of memory at step 7 \(epoch 2\).*last checkpoint is .*last.safetensors; "
        "try a smaller data.batch"
    )
    with pytest.raises(TrainingError, match=message):
        trainer(tmp_path, broken(Toy(), 7, error)).fit()
    resumes_exactly(tmp_path)


def test_a_failing_allocation_is_reported_as_out_of_memory(tmp_path):
    task = Toy()
    task.loss = lambda batch: torch.empty(2**60)
    with pytest.raises(TrainingError, match="out of memory at step 1"):
        trainer(tmp_path, task).fit()


def test_other_errors_are_not_wrapped(tmp_path):
    with pytest.raises(RuntimeError, match="shapes") as error:
        trainer(tmp_path, broken(Toy(), 2, RuntimeError("shapes"))).fit()
    assert not isinstance(error.value, TrainingError)


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_loss_that_is_not_finite_stops_the_run(tmp_path, value):
    with pytest.raises(
        TrainingError, match=rf"loss {value} at step 7 .*last checkpoint is .*last.safetensors"
    ):
        trainer(tmp_path, broken(Toy(), 7, value)).fit()
    resumes_exactly(tmp_path)


class FullDisk:
    """A file whose disk is full."""

    def write(self, *_):
        raise OSError(errno.ENOSPC, "No space left on device")

    writerow = write


def test_a_full_disk_while_writing_a_checkpoint(tmp_path, monkeypatch):
    run = trainer(tmp_path)
    train = run._train

    def fills(batches):
        train(batches)
        if run.step == 7:
            monkeypatch.setattr(checkpoints.tensor_file, "write", FullDisk().write)

    run._train = fills
    with pytest.raises(
        TrainingError,
        match=r"could not be written \(.*No space left.*; the previous checkpoint is unchanged",
    ):
        run.fit()
    monkeypatch.undo()
    resumes_exactly(tmp_path)


def test_a_full_disk_while_writing_a_log(tmp_path):
    run = trainer(tmp_path)
    train = run._train

    def fills(batches):
        train(batches)
        if run.step == 6:
            run.log.steps.writer = FullDisk()

    run._train = fills
    with pytest.raises(
        TrainingError,
        match=r"log could not be written \(.*No space left.*checkpoint is .*last.safet",
    ):
        run.fit()
    resumes_exactly(tmp_path)


def resumes_exactly(out):
    whole = trainer(out / "whole")
    whole.fit()
    run = trainer(out)
    run.resume()
    assert run.step in (4, 6)
    run.fit()
    assert torch.equal(weights(run), weights(whole))
    assert column(out, "loss") == column(out / "whole", "loss")


# torch.compile.


def test_a_compiled_model_has_the_same_losses_and_checkpoints(tmp_path):
    trainer(tmp_path / "plain").fit()
    for steps in (5, None):
        torch.manual_seed(0)
        run = Trainer(
            Toy(),
            TrainingSettings(epochs=3, lr=0.1, steps=steps),
            tmp_path / "compiled",
            compile="aot_eager",
        )
        if steps is None:
            run.resume()
        run.fit()
    assert column(tmp_path / "compiled", "loss") == pytest.approx(
        column(tmp_path / "plain", "loss"), rel=1e-5
    )
    states = [
        load_checkpoint(tmp_path / out / "last.safetensors")["model"]
        for out in ("plain", "compiled")
    ]
    assert list(states[0]) == list(states[1])


def test_training_is_compiled_and_validation_is_not(tmp_path):
    compiled = []

    def backend(graph, inputs):
        compiled.append(graph)
        return graph.forward

    run = Trainer(Toy(), TrainingSettings(epochs=1, lr=0.1), tmp_path, compile=backend)
    run.validate()
    assert not compiled
    run.fit()
    assert compiled


def test_a_missing_compiler_is_one_sentence(tmp_path):
    def backend(graph, inputs):
        raise RuntimeError("No working C++ compiler found")

    run = Trainer(Toy(), TrainingSettings(), tmp_path, compile=backend)
    with pytest.raises(
        TrainingError,
        match=r"torch.compile failed at step 1 .*No working C\+\+ comp.*train without --compile",
    ):
        run.fit()


# Optional packages.


def test_missing_tensorboard_and_matplotlib_are_reported(tmp_path, monkeypatch, capsys):
    for name in ("torch.utils.tensorboard", "tensorboard", "matplotlib.figure", "matplotlib"):
        monkeypatch.setitem(sys.modules, name, None)
    trainer(tmp_path).fit()
    assert "no TensorBoard log, no plots: that needs packages" in capsys.readouterr().out
    with pytest.raises(ImportError):
        plot(tmp_path)
    assert len(column(tmp_path, "loss")) == 18


def test_the_trainer_loads_no_optional_package():
    code = (
        "import sys, fusedseq.tasks.training; "
        "print(*{'rich', 'tensorboard', 'matplotlib'} & {*sys.modules})"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    found = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True
    )
    assert found.stdout.strip() == ""


def test_every_validation_metric_is_plotted(tmp_path):
    trainer(tmp_path).fit()
    assert {path.name for path in plot(tmp_path)} == {"loss.png", "accuracy.png"}  # lr is constant
    assert plot(tmp_path / "nothing") == []


def test_a_run_that_ends_within_its_first_epoch_is_plotted(tmp_path, monkeypatch):
    figure = pytest.importorskip("matplotlib.figure")
    titles, savefig = [], figure.Figure.savefig

    def saved(self, path, **options):
        titles.append(self.axes[0].get_title())
        savefig(self, path, **options)

    monkeypatch.setattr(figure.Figure, "savefig", saved)
    run = trainer(tmp_path, steps=4)
    assert run.fit() == "steps"
    assert (tmp_path / "epochs.csv").read_text() == ""  # no validation
    assert [path.name for path in plot(tmp_path)] == ["loss.png"]
    assert titles == [f"loss of {tmp_path.parent.name}/{tmp_path.name}"]
    assert curves(tmp_path)["loss"]["train"] == ([1, 2, 3, 4], column(tmp_path, "loss"))


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_the_bar_ends_at_the_number_of_steps_that_were_asked_for(tmp_path, monkeypatch):
    totals = []
    monkeypatch.setattr(
        Log, "start_epoch", lambda self, epoch, done, total: totals.append((done, total))
    )
    run = trainer(tmp_path, steps=8)  # an epoch has 6 steps
    run.fit()
    assert totals == [(0, 6), (0, 2)]


def test_evaluations_show_progress_below_the_bar_of_the_epoch(monkeypatch):
    console = pytest.importorskip("rich.console").Console(file=Terminal(), width=120)
    bar = progress.Bar(console)
    try:
        bar.start_epoch(0, 0, 5)
        seen = []
        for item in progress.watched("abc", "evaluating valid"):
            seen.append(item)
            assert [task.description for task in bar.bar.tasks] == ["epoch 1", "evaluating valid"]
            assert bar.bar.tasks[1].completed == len(seen) - 1
            assert bar.bar.tasks[1].total == 3
        assert seen == ["a", "b", "c"]
        assert len(bar.bar.tasks) == 1
    finally:
        bar.stop()
    assert list(progress.watched("ab", "without a bar")) == ["a", "b"]
    assert progress._shown == []


# on_validation.


def test_on_validation_receives_the_metrics_and_may_stop_the_run(tmp_path):
    seen = []
    run = trainer(tmp_path, epochs=5)
    run.on_validation = lambda number, metrics: (
        seen.append((number, metrics["loss"])) or number == 2
    )
    assert run.fit() == "stopped"
    assert seen == list(enumerate(column(tmp_path, "valid_loss", "epochs")))
    assert len(seen) == 3
    assert load_checkpoint(tmp_path / "last.safetensors")["position"]["epoch"] == 3
