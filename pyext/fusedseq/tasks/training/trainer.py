"""Trains any task: steps, validations, logs, checkpoints, exact resume."""

import json
import math
import signal
import threading
import time
from contextlib import contextmanager
from pathlib import Path

import torch

from fusedseq.tasks.training.checkpoint import load_checkpoint, save_checkpoint
from fusedseq.tasks.training.compiling import compile_training
from fusedseq.tasks.training.errors import CheckpointError, TrainingError
from fusedseq.tasks.training.failures import explained
from fusedseq.tasks.training.gradient import Gradient
from fusedseq.tasks.training.learning_rate import lr_factor
from fusedseq.tasks.training.log import Log, NoLog
from fusedseq.tasks.training.optimization import Optimization, Schedule, freeze
from fusedseq.tasks.training.processes import Processes

LAST, BEST, RESULT = "last.safetensors", "best.safetensors", "result.json"


class Trainer:
    """Trains `task.model` and keeps everything in the directory `out`.

    A task has
        model                    the torch.nn.Module
        unit                     what is counted, e.g. "tokens"
        description()            JSON: what the model was built from, kept in every checkpoint
        start_epoch(epoch, part, parts)   a sequence of batches, made when they are asked for: a pure function of
                                 `epoch` and of what is carried, so that a resumed run goes on at any index; resets what
                                 is of one epoch. Of `parts` processes each has its part of every batch
        loss(batch)              a Step: means, and the count that they are over
        validate()               a dict of figures; "loss" is the one to minimise
        state_dict(), load_state_dict(state)    what is carried from batch to batch, beside the model

    `out` holds last.safetensors (everything, to resume), best.safetensors (the weights of the best validation,
    averaged where averaging is on), steps.csv, epochs.csv, tensorboard/. label: JSON, kept in the checkpoints.
    on_validation: called after each validation with its number, from 0, and its figures; where it returns True the run
    is stopped there
    processes: those that train together    compile: a backend of torch.compile for the model in training, or None
    """

    def __init__(self, task, settings, out, label=None, *, on_validation=None, processes=None, compile=None):
        self.task, self.settings, self.out, self.label = task, settings, Path(out), label
        self.device = next(task.model.parameters()).device
        freeze(task.model, settings.freeze)
        self.optimization = Optimization(task.model.parameters(), settings)
        self.schedule = Schedule(settings)
        self.processes = processes or Processes()
        self.gradient = Gradient(task, settings, self.processes)
        if compile:
            compile_training(task.model, compile)
        self.epoch, self.index, self.step = 0, 0, 0  # index: of the next batch in this epoch
        self.loss_sum, self.items = 0.0, 0  # of the training loss, since the last validation
        self.carried = None  # the task's state in a checkpoint, until its epoch is started again
        self.seconds = 0.0  # of training, without validations and checkpoints
        self.pending = []  # steps whose losses are still on the device
        self.interrupted = False
        self.on_validation, self.stopped = on_validation, False

    # What a run is at a step boundary.

    def state_dict(self):
        own = {"task": self.task.state_dict(), "rng": {"cpu": torch.get_rng_state(), "cuda": self._cuda_rng()}}
        ranks = {} if self.processes.count == 1 else {"ranks": self.processes.gather(own)}
        return {
            "description": self.task.description(),
            "label": self.label,
            "model": self.task.model.state_dict(),
            "optimization": self.optimization.state_dict(),
            "schedule": self.schedule.state_dict(),
            "task": own["task"],
            "position": {"epoch": self.epoch, "index": self.index, "step": self.step},
            "train": {"loss_sum": self.loss_sum, "items": self.items, "seconds": self.seconds},
            "rng": own["rng"],
            **ranks,  # the task and rng of each process
        }

    def load_state_dict(self, state):
        try:
            self.task.model.load_state_dict(state["model"])
            self.optimization.load_state_dict(state["optimization"])
            self.schedule.load_state_dict(state["schedule"])
            own = self._own(state)
            self.carried = own["task"]
            self.task.load_state_dict(self.carried)  # what outlives an epoch; the rest again, when its epoch is started
            self.epoch, self.index, self.step = (state["position"][k] for k in ("epoch", "index", "step"))
            self.loss_sum, self.items = state["train"]["loss_sum"], state["train"]["items"]
            self.seconds = state["train"].get("seconds", 0.0)  # which the first checkpoints did not have
            torch.set_rng_state(own["rng"]["cpu"])
            if own["rng"]["cuda"] is not None and self.device.type == "cuda":
                torch.cuda.set_rng_state(own["rng"]["cuda"], self.device)
        except (KeyError, RuntimeError, ValueError) as error:
            raise CheckpointError(f"checkpoint does not fit this run: {error}") from error

    def _own(self, state):
        """What of a checkpoint is this process's."""
        ranks = state.get("ranks", [state])
        if len(ranks) != self.processes.count:
            raise ValueError(f"it was saved by {len(ranks)} processes, got {self.processes.count}")
        return ranks[self.processes.rank]

    def _cuda_rng(self):
        return torch.cuda.get_rng_state(self.device) if self.device.type == "cuda" else None

    def resume(self):
        self.load_state_dict(load_checkpoint(self.out / LAST))

    def save(self):
        self.flush()  # a loss that is not finite is found before it is saved
        self._write(LAST, self.state_dict())

    def _write(self, name, state):
        if self.processes.first:
            save_checkpoint(self.out / name, state)

    # The loop.

    def fit(self):
        """Trains to the end; returns why it ended: epochs, steps, early stop, interrupted or stopped."""
        self.out.mkdir(parents=True, exist_ok=True)
        with (explained(self._where, self.out / LAST), self._opened_log() as self.log,
              self._stop_at_signal(), self.gradient.sharing()):  # fmt: skip
            if self.processes.rank and not self.step:
                torch.manual_seed(torch.initial_seed() + self.processes.rank)  # dropout masks of its own
            if not self.processes.any((self.out / LAST).exists()):
                self.save()  # so that a run killed at any moment can be resumed
            self.task.model.train()
            while self._end() is None:
                self._epoch()
            self.save()
        return self._end()

    def _opened_log(self):
        if not self.processes.first:
            return NoLog()
        for stale in self.out.glob(".*.tmp"):  # of a process killed while it wrote
            stale.unlink()
        return Log(self.out, self.task.unit, self.step)

    def _epoch(self):
        s, begun = self.settings, time.perf_counter()
        batches = self.task.start_epoch(self.epoch, self.processes.rank, self.processes.count)
        if self.carried is not None and self.index:
            self.task.load_state_dict(self.carried)
        self.carried = None
        total = -(-len(batches) // s.accumulate)
        self.seconds += time.perf_counter() - begun  # what batches take to be made, labels perhaps, is training
        self.log.start_epoch(self.epoch, self.index // s.accumulate, total)
        while self.index < len(batches):
            if self._end() is not None:
                return
            self._train([batches[i] for i in range(self.index, min(self.index + s.accumulate, len(batches)))])
            if s.eval_steps and self.step % s.eval_steps == 0:
                self._validate()
            if s.save_steps and self.step % s.save_steps == 0:
                self.save()
        self.epoch, self.index = self.epoch + 1, 0
        if not s.eval_steps:
            self._validate()
        self.save()

    def _end(self):
        s = self.settings
        if self.processes.any(self.interrupted):
            return "interrupted"
        if self.stopped:
            return "stopped"
        if self.schedule.stopped:
            return "early stop"
        if s.steps is not None and self.step >= s.steps:
            return "steps"
        return "epochs" if s.epochs is not None and self.epoch >= s.epochs else None

    def _where(self):
        return f"step {self.step + 1} (epoch {self.epoch + 1})"

    def _train(self, batches):
        """One step, on all of `batches`."""
        self.optimization.zero_grad()
        result = self.gradient(batches)
        scale = result.lr_scale * lr_factor(self.settings, self.step)
        norm = self.optimization.step(scale, with_norm=(self.step + 1) % self.settings.log_steps == 0)
        self.index += len(batches)
        self.step += 1
        row = (self.step, self.epoch, result.loss, self.optimization.lr * scale, norm, result.items)
        self.pending.append(row)
        if len(self.pending) >= self.settings.log_steps:
            self.flush()

    def flush(self):
        """Fetches the pending losses, checks them, logs them."""
        if not self.pending:
            return
        taken = [figure for row in self.pending for figure in (row[2], row[4]) if figure is not None]
        figures = iter(torch.stack([figure.double() for figure in taken]).tolist())
        rows = [(step, epoch, next(figures), lr, None if norm is None else next(figures), items)
                for step, epoch, _, lr, norm, items in self.pending]  # fmt: skip
        self.pending = []
        for step, epoch, loss, lr, norm, items in rows:
            if not math.isfinite(loss) or (norm is not None and not math.isfinite(norm)):
                what = f"loss {loss}" if not math.isfinite(loss) else f"gradient norm {norm}"
                raise TrainingError(f"{what} at step {step} (epoch {epoch + 1}, lr {lr:g}): training stopped, "
                                    f"the last good checkpoint is {self.out / LAST}; try a lower lr or clip")  # fmt: skip
            self.loss_sum += loss * items
            self.items += items
        self.seconds += self.log.train(rows)

    def _validate(self):
        self.flush()
        begun = time.perf_counter()
        averaged = self.optimization.averaging
        with self.optimization.averaged():
            metrics = self.processes.from_first(self.validate)
            if not math.isfinite(metrics["loss"]):
                raise TrainingError(f"validation loss {metrics['loss']} at step {self.step}: training stopped, "
                                    f"the last good checkpoint is {self.out / LAST}")  # fmt: skip
            follows = self.schedule.observe(metrics["loss"])
            if "improved" in follows:
                self._save_best(metrics)
        self.log.validation({
            "step": self.step, "epoch": self.epoch, "train_loss": self.loss_sum / max(self.items, 1),
            **{f"valid_{name}": value for name, value in metrics.items()}, "train_lr": self.optimization.lr,
            "train_averaged": int(averaged), "valid_seconds": round(time.perf_counter() - begun, 3),
        })  # fmt: skip
        self.loss_sum, self.items = 0.0, 0
        if self.on_validation is not None:
            number = len(self.schedule.losses) - 1
            self.stopped = self.processes.from_first(lambda: bool(self.on_validation(number, metrics)))
        if "anneal" in follows:
            self.optimization.anneal()
            self.log.say(f"step {self.step}: learning rate lowered to {self.optimization.lr:g}")
        if "average" in follows and not averaged:
            self.optimization.start_averaging()
            self.log.say(f"step {self.step}: averaging begins ({self.settings.averaging})")
        self.log.restart_clock()

    def validate(self):
        """The task's figures for the weights as they are, in eval mode."""
        self.task.model.eval()
        try:
            with torch.no_grad():
                return self.task.validate()
        finally:
            self.task.model.train()

    def _save_best(self, metrics):
        state = {"description": self.task.description(), "label": self.label, "model": self.task.model.state_dict(),
                 "metrics": metrics, "position": {"epoch": self.epoch, "index": self.index, "step": self.step}}  # fmt: skip
        self._write(BEST, state)

    def finish(self):
        """Puts the weights to be judged into the model, and returns their validation figures: the best validation's,
        else (none was reached) the current ones, averaged where averaging is on, which are then written as
        best.safetensors. The schedule is untouched: a run resumed later goes on as if it had not ended."""
        if self.schedule.best is None:
            with self.optimization.averaged():
                self._save_best(self.validate())
        best = load_checkpoint(self.out / BEST)
        self.task.model.load_state_dict(best["model"])
        return best["metrics"]

    def report(self, results):
        """Writes what came out as result.json."""
        (self.out / RESULT).write_text(json.dumps(results, indent=1) + "\n")

    @contextmanager
    def _stop_at_signal(self):
        """The first SIGINT or SIGTERM ends the run at the next step boundary, with a checkpoint; a second one at once."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return

        def stop(number, frame):
            if self.interrupted:
                raise KeyboardInterrupt
            self.interrupted = True

        earlier = {number: signal.signal(number, stop) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for number, handler in earlier.items():
                signal.signal(number, handler)
