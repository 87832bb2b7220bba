"""The logs of a run: steps.csv, epochs.csv, TensorBoard, and a progress bar on the terminal."""

import csv
import io
import os
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from fusedseq.tasks.training.files import finish, named, read_text, refuse_link, unfinished
from fusedseq.tasks.training.progress import progress

STEPS = ("step", "epoch", "loss", "lr", "grad_norm", "items", "items_per_s")


class Log:
    """Writes the logs of one run into directory `out`.

    A resumed run deletes the lines that were written after its checkpoint, so that its files equal
    those of an uninterrupted run (except for times).
    unit: what the items of a step are called    step: the number of steps in the checkpoint
    """

    def __init__(self, out: Path, unit: str, step: int) -> None:
        self.out, self.unit = Path(out), unit
        self.steps = _Table(self.out / "steps.csv", step, [c.replace("items", unit) for c in STEPS])
        self.epochs = _Table(self.out / "epochs.csv", step)
        self.board = _board(self.out / "tensorboard", step)
        self.bar = progress()
        self.since = time.perf_counter()

    def __enter__(self) -> "Log":
        return self

    def __exit__(self, *_: Any) -> None:
        self.bar.stop()
        self.board.close()
        self.steps.close()
        self.epochs.close()

    def start_epoch(self, epoch: int, done: int, total: int) -> None:
        """Starts the progress bar of an epoch. epoch: from 0    done, total: steps"""
        self.bar.start_epoch(epoch, done, total)
        self.restart_clock()

    def restart_clock(self) -> None:
        """Excludes the time since the last call, e.g. of a validation, from the speeds."""
        self.since = time.perf_counter()

    def train(self, steps: Sequence[tuple]) -> float:
        """Logs the steps since the last call; returns the seconds that they took.

        steps: (step, epoch, loss, lr, grad_norm or None, items) each
        """
        seconds = time.perf_counter() - self.since
        # A clock may stand still, e.g. one of low resolution; the speed is then unknown.
        speed = sum(step[-1] for step in steps) / seconds if seconds > 0 else None
        for values in steps:
            self.steps.write((*values, None if speed is None else round(speed, 1)))
            step, _, loss, lr, norm, _ = values
            scalars = (
                ("loss", loss),
                ("lr", lr),
                ("grad_norm", norm),
                (f"{self.unit}_per_s", speed),
            )
            for name, value in scalars:
                if value is not None:
                    self.board.add_scalar(f"train/{name}", value, step)
        text = f"loss {steps[-1][2]:.3f}, lr {steps[-1][3]:.3g}"
        text += "" if speed is None else f", {speed:,.0f} {self.unit}/s"
        self.bar.advance(len(steps), text)
        self.restart_clock()
        return seconds

    def validation(self, line: dict[str, Any]) -> None:
        """Logs one validation: a line of epochs.csv and of the terminal.

        line: {column: value}, with "step" first
        """
        self.epochs.write(list(line.values()), list(line))
        for name, value in line.items():
            if name not in ("step", "epoch"):
                self.board.add_scalar(name.replace("_", "/", 1), float(value), line["step"])
        text = ", ".join(
            f"{name} {value:.4g}" if isinstance(value, float) else f"{name} {value}"
            for name, value in line.items()
        )
        self.say(text)

    def say(self, text: str) -> None:
        """Prints a line; rich keeps the progress bar below it."""
        print(text, flush=True)


class NoLog:
    """The log of the processes other than the first, which writes nothing."""

    def __enter__(self) -> "NoLog":
        return self

    def __exit__(self, *_: Any) -> None:
        pass

    def _ignore(self, *_: Any) -> None:
        pass

    start_epoch = restart_clock = validation = say = _ignore

    def train(self, steps: Sequence[tuple]) -> float:
        return 0.0


def _board(folder: Path, step: int) -> Any:
    """A TensorBoard writer; without TensorBoard an object whose methods do nothing.

    Errors: ValueError where `folder` is not a real directory. The files in it have new names.
    """
    refuse_link(folder)
    try:
        # Imported here because the import takes a second, which only training should pay.
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:  # the trainer has said so
        return _NoBoard()
    return SummaryWriter(folder, purge_step=step + 1)


class _NoBoard:
    def add_scalar(self, *_: Any) -> None:
        pass

    def close(self) -> None:
        pass


class _Table:
    """A CSV file written line by line, whose first column is the step.

    Opening it deletes the lines of steps after `step`. header: None takes that of the first `write`
    """

    def __init__(self, path: Path, step: int, header: list[str] | None = None) -> None:
        lines = self._before(path, step) if step and path.exists() else []
        # The file that replaces the previous one stays open: it is not looked up by its name again.
        self.file, temporary = unfinished(path)
        try:
            with named(path):
                self.writer: Any = csv.writer(self.file, lineterminator="\n")
                self.writer.writerows(lines or ([header] if header else []))
                finish(self.file, temporary, path)
        except BaseException:
            with suppress(OSError):
                os.unlink(temporary)
            raise
        self.file.reconfigure(line_buffering=True)  # type: ignore[attr-defined]
        self.empty = not lines and not header

    @staticmethod
    def _before(path: Path, step: int) -> list[list[str]]:
        """The header and the lines up to `step`. Errors: ValueError, which names the file"""
        text = read_text(path)
        # The last line may be incomplete, if the process was killed while writing it, or the disk
        # was full: a line without a newline at its end is left out.
        text = text[: text.rfind("\n") + 1]
        try:
            return [
                line
                for line in csv.reader(io.StringIO(text, newline=""))
                if line and (line[0] == "step" or (_is_number(line[0]) and int(line[0]) <= step))
            ]
        except csv.Error as error:
            raise ValueError(f"{path} is damaged: {error}") from None

    def write(self, values: Sequence[Any], header: Sequence[str] = ()) -> None:
        if self.empty:
            self.writer.writerow(header)
            self.empty = False
        self.writer.writerow(values)

    def close(self) -> None:
        self.file.close()


def _is_number(text: str) -> bool:
    """Whether a cell is a number of steps."""
    return text.isascii() and text.isdigit() and len(text) < 20
