"""Trains any task: steps, validations, logs, checkpoints, exact resume."""

import math
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from fusedseq.tasks.training import packages
from fusedseq.tasks.training.checkpoint import load_checkpoint, save_checkpoint
from fusedseq.tasks.training.compiling import compile_training
from fusedseq.tasks.training.errors import CheckpointError, TrainingError
from fusedseq.tasks.training.failures import explained, is_out_of_memory, last_good
from fusedseq.tasks.training.files import remove_unfinished, write_json
from fusedseq.tasks.training.gradient import Gradient
from fusedseq.tasks.training.learning_rate import lr_factor
from fusedseq.tasks.training.lock import run_directory
from fusedseq.tasks.training.log import Log, NoLog
from fusedseq.tasks.training.optimization import (
    Optimization,
    Schedule,
    TrainingSettings,
    freeze,
    number,
)
from fusedseq.tasks.training.processes import Processes, seed_of_rank
from fusedseq.tasks.training.signals import Interruption
from fusedseq.tasks.training.task import Task

LAST, BEST, RESULT = "last.safetensors", "best.safetensors", "result.json"


class Trainer:
    """Trains `task.model` and writes everything into the directory `out`.

    `out` receives last.safetensors (the whole state, to resume from), best.safetensors (the weights
    of the best validation, averaged if averaging has started), steps.csv, epochs.csv and
    tensorboard/.

    task: a `training.Task`    settings: a TrainingSettings
    label: JSON that is stored in every checkpoint
    on_validation: called after each validation with its number, from 0, and its metrics; the run
        stops when it returns True
    processes: the processes that train together; None for one
    compile: a backend of torch.compile for the model in training mode; None does not compile
    Errors: ValueError where the settings do not fit the model
    """

    def __init__(
        self,
        task: Task,
        settings: TrainingSettings,
        out: str | Path,
        label: Any = None,
        *,
        on_validation: Callable[[int, dict], Any] | None = None,
        processes: Processes | None = None,
        compile: str | Callable | None = None,
    ) -> None:
        self.task, self.settings, self.out, self.label = task, settings, Path(out), label
        self.device = next(task.model.parameters()).device
        freeze(task.model, settings.freeze)
        self.optimization = Optimization(task.model.parameters(), settings)
        self.schedule = Schedule(settings)
        self.processes = processes or Processes()
        self.gradient = Gradient(task, settings, self.processes)
        if compile:
            compile_training(task.model, compile)
        self.epoch, self.step = 0, 0
        self.index = 0  # of the next batch in this epoch
        self.loss_sum, self.items = 0.0, 0  # of the training loss since the last validation
        self.carried: dict | None = None  # a checkpoint's task state until its epoch has started
        self.seconds = 0.0  # of training, without validations and checkpoints
        self.pending: list[tuple] = []  # steps whose losses are still on the device
        self.interruption = Interruption()
        self.on_validation, self.stopped = on_validation, False

    # The state of a run between two steps.

    def state_dict(self) -> dict[str, Any]:
        """The whole state of the run, from which it continues bit for bit."""
        own = {
            "task": self.task.state_dict(),
            "rng": {"cpu": torch.get_rng_state(), "cuda": self._cuda_rng()},
        }
        # With several processes the task state and the generator state of each are stored.
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
            **ranks,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores what `state_dict` returned.

        Errors: CheckpointError where the state does not fit this run
        """
        try:
            self.task.model.load_state_dict(state["model"])
            self.optimization.load_state_dict(state["optimization"])
            self.schedule.load_state_dict(state["schedule"])
            own = self._own(state)
            # The task's state is loaded now for what outlives an epoch, and again after the
            # epoch has been started, which resets the rest.
            self.carried = own["task"]
            self.task.load_state_dict(own["task"])
            position, train = state["position"], state["train"]
            self.epoch, self.index, self.step = (
                number(position, name, whole=True) for name in ("epoch", "index", "step")
            )
            self.loss_sum, self.items = number(train, "loss_sum"), number(train, "items")
            # The first checkpoints did not store the seconds.
            self.seconds = number({"seconds": 0.0} | train, "seconds")
            torch.set_rng_state(own["rng"]["cpu"])
            if own["rng"]["cuda"] is not None and self.device.type == "cuda":
                torch.cuda.set_rng_state(own["rng"]["cuda"], self.device)
        except KeyError as error:
            raise CheckpointError(
                f"checkpoint {self.out / LAST} does not fit this run: it has no {error}"
            ) from error
        except (RuntimeError, SystemError, MemoryError) as error:
            if is_out_of_memory(error):
                raise TrainingError(
                    f"out of memory while loading checkpoint {self.out / LAST}"
                ) from error
            raise self._misfit(error) from error
        except (AttributeError, IndexError, OverflowError, TypeError, ValueError) as error:
            raise self._misfit(error) from error

    def _misfit(self, error: Exception) -> CheckpointError:
        return CheckpointError(f"checkpoint {self.out / LAST} does not fit this run: {error}")

    def _own(self, state: dict) -> dict:
        """The part of a checkpoint that belongs to this process."""
        ranks = state.get("ranks", [state])
        if not isinstance(ranks, list):
            raise TypeError(f"ranks must be a list, got {type(ranks).__name__}")
        if len(ranks) != self.processes.count:
            raise ValueError(
                f"it was saved by {len(ranks)} processes, got {self.processes.count}: continue it "
                f"with {len(ranks)}, as by torchrun --nproc-per-node {len(ranks)}"
            )
        return ranks[self.processes.rank]

    def _cuda_rng(self) -> torch.Tensor | None:
        return torch.cuda.get_rng_state(self.device) if self.device.type == "cuda" else None

    def resume(self) -> None:
        """Loads the last checkpoint in `out`."""
        self.load_state_dict(load_checkpoint(self.out / LAST))

    def save(self) -> None:
        """Writes last.safetensors."""
        self.flush()  # so that a loss that is not finite raises before it can be saved
        self._write(LAST, self.state_dict())

    def _write(self, name: str, state: dict) -> None:
        """Writes a checkpoint, unless its weights are not finite: it could not be loaded.

        Errors: TrainingError for such weights
        """
        for weight, t in self.task.model.named_parameters():
            if not t.isfinite().all():
                raise TrainingError(
                    f"{weight} is not finite after step {self.step}: training stopped, "
                    f"{last_good(self.out / LAST)}; try a lower lr or clip"
                )
        if self.processes.first:
            save_checkpoint(self.out / name, state)

    # The training loop.

    def fit(self) -> str:
        """Trains to the end.

        Returns why it ended: "epochs", "steps", "early stop", "interrupted" or "stopped".
        Errors: TrainingError where training cannot continue; ValueError where another run holds the
            lock of the directory `out`
        """
        self.out.mkdir(parents=True, exist_ok=True)
        with (
            run_directory(self.out, self.processes),
            explained(self._where, self.out / LAST),
            self._opened_log() as self.log,
            self.interruption.on_signal(),
            self.gradient.sharing(),
        ):
            if self.processes.rank and not self.step and self.carried is None:
                # Each process draws its own dropout masks. A checkpoint, which may be of step 0,
                # has the state of the generator that was seeded so.
                torch.manual_seed(seed_of_rank(torch.initial_seed(), self.processes.rank))
            if not self.processes.any((self.out / LAST).exists()):
                self.save()  # so that a run killed at any moment can be resumed
            self.task.model.train()
            while (why := self._end()) is None:
                self._epoch()
            self.save()
        return why

    def _opened_log(self) -> Log | NoLog:
        if not self.processes.first:
            return NoLog()
        remove_unfinished(self.out)
        if text := packages.remark(getattr(self.task, "packages", {})):
            print(text, flush=True)
        return Log(self.out, self.task.unit, self.step)

    def _epoch(self) -> None:
        """Trains to the end of the epoch, or of the run."""
        s, started = self.settings, time.perf_counter()
        batches = self.task.start_epoch(self.epoch, self.processes.rank, self.processes.count)
        if self.carried is not None and self.index:
            self.task.load_state_dict(self.carried)
        self.carried = None
        done, total = self.index // s.accumulate, -(-len(batches) // s.accumulate)
        if s.steps is not None:  # the run may end within this epoch
            total = min(total, done + max(0, s.steps - self.step))
        # Preparing the batches, which may include labelling them, counts as training time.
        self.seconds += time.perf_counter() - started
        self.log.start_epoch(self.epoch, done, total)
        while self.index < len(batches):
            if self._end() is not None:
                return
            end = min(self.index + s.accumulate, len(batches))
            self._train([batches[i] for i in range(self.index, end)])
            if s.eval_steps and self.step % s.eval_steps == 0:
                self._validate()
            # After the last batch the epoch is saved below, with its validation.
            if s.save_steps and self.step % s.save_steps == 0 and self.index < len(batches):
                self.save()
        self.epoch, self.index = self.epoch + 1, 0
        if not s.eval_steps:
            self._validate()
        self.save()

    def _end(self) -> str | None:
        """Why the run ends at this step; None if it continues."""
        s = self.settings
        if self.processes.any(self.interruption.requested):
            return "interrupted"
        if self.stopped:
            return "stopped"
        if self.schedule.stopped:
            return "early stop"
        if s.steps is not None and self.step >= s.steps:
            return "steps"
        return "epochs" if s.epochs is not None and self.epoch >= s.epochs else None

    def _where(self) -> str:
        return f"step {self.step + 1} (epoch {self.epoch + 1})"

    def _train(self, batches: Sequence[Any]) -> None:
        """One step, on all of `batches`."""
        self.optimization.zero_grad()
        result = self.gradient(batches)
        scale = result.lr_scale * lr_factor(self.settings, self.step)
        norm = self.optimization.step(
            scale, with_norm=(self.step + 1) % self.settings.log_steps == 0
        )
        self.index += len(batches)
        self.step += 1
        lr = self.optimization.lr * scale
        self.pending.append((self.step, self.epoch, result.loss, lr, norm, result.items))
        if len(self.pending) >= self.settings.log_steps:
            self.flush()

    def flush(self) -> None:
        """Copies the pending losses from the device, checks that they are finite, and logs them.

        Errors: TrainingError where a loss or a gradient norm is not finite
        """
        if not self.pending:
            return
        # All values are copied in one transfer.
        on_device = [x for step in self.pending for x in (step[2], step[4]) if x is not None]
        values = iter(torch.stack([x.double() for x in on_device]).tolist())
        steps = [
            (step, epoch, next(values), lr, None if norm is None else next(values), items)
            for step, epoch, _, lr, norm, items in self.pending
        ]
        self.pending = []
        for step, epoch, loss, lr, norm, items in steps:
            if not math.isfinite(loss) or (norm is not None and not math.isfinite(norm)):
                what = f"loss {loss}" if not math.isfinite(loss) else f"gradient norm {norm}"
                raise TrainingError(
                    f"{what} at step {step} (epoch {epoch + 1}, lr {lr:g}): training stopped, "
                    f"{last_good(self.out / LAST)}; try a lower lr or clip"
                )
            self.loss_sum += loss * items
            self.items += items
        self.seconds += self.log.train(steps)

    def _validate(self) -> None:
        """Validates, saves the weights if they are the best, and applies the schedule."""
        self.flush()
        started = time.perf_counter()
        averaged = self.optimization.averaging
        with self.optimization.averaged():
            metrics = self.processes.from_first(self.validate)
            self._check_loss(metrics)
            events = self.schedule.observe(metrics["loss"])
            if "improved" in events:
                self._save_best(metrics)
        self.log.validation(
            {
                "step": self.step,
                "epoch": self.epoch,
                "train_loss": self.loss_sum / max(self.items, 1),
                **{f"valid_{name}": value for name, value in metrics.items()},
                "train_lr": self.optimization.lr,
                "train_averaged": int(averaged),
                "valid_seconds": round(time.perf_counter() - started, 3),
            }
        )
        self.loss_sum, self.items = 0.0, 0
        self._ask_to_stop(metrics)
        if "anneal" in events:
            self.optimization.anneal()
            self.log.say(f"step {self.step}: learning rate lowered to {self.optimization.lr:g}")
        if "average" in events and not averaged:
            self.optimization.start_averaging()
            self.log.say(f"step {self.step}: averaging starts ({self.settings.averaging})")
        self.log.restart_clock()

    def _check_loss(self, metrics: dict) -> None:
        if not math.isfinite(metrics["loss"]):
            raise TrainingError(
                f"validation loss {metrics['loss']} at step {self.step}: training stopped, "
                f"{last_good(self.out / LAST)}"
            )

    def _ask_to_stop(self, metrics: dict) -> None:
        """Calls `on_validation`, in the first process."""
        hook, number = self.on_validation, len(self.schedule.losses) - 1
        if hook is not None:
            self.stopped = self.processes.from_first(lambda: bool(hook(number, metrics)))

    def validate(self) -> dict[str, float]:
        """The task's metrics with the current weights, computed in eval mode."""
        self.task.model.eval()
        try:
            with torch.no_grad():
                return self.task.validate()
        finally:
            self.task.model.train()

    def _save_best(self, metrics: dict) -> None:
        state = {
            "description": self.task.description(),
            "label": self.label,
            "model": self.task.model.state_dict(),
            "metrics": metrics,
            "position": {"epoch": self.epoch, "index": self.index, "step": self.step},
        }
        self._write(BEST, state)

    def finish(self) -> dict[str, float]:
        """Loads the weights to be evaluated into the model; returns their validation metrics.

        These are the weights of the best validation. If there was no validation, they are the
        current weights, averaged if averaging has started, which are then written to
        best.safetensors. The schedule does not change, so a run resumed later continues as if it
        had not ended.
        """
        if self.schedule.best is None:
            with self.optimization.averaged():
                metrics = self.validate()
                self._check_loss(metrics)
                self._save_best(metrics)
        best = load_checkpoint(self.out / BEST)
        try:
            self.task.model.load_state_dict(best["model"])
            return dict(best["metrics"])
        except (KeyError, TypeError, ValueError, AttributeError, RuntimeError) as error:
            raise CheckpointError(
                f"checkpoint {self.out / BEST} does not fit this run: {error}"
            ) from error

    def report(self, results: dict[str, Any]) -> None:
        """Writes result.json atomically."""
        write_json(self.out / RESULT, results)
