"""What a run leaves to read: steps.csv, epochs.csv, a TensorBoard log, and a progress bar on the terminal."""

import csv
import os
import time
from pathlib import Path

from fusedseq.tasks.training.progress import progress

STEPS = ("step", "epoch", "loss", "lr", "grad_norm", "items", "items_per_s")


class Log:
    """Rows of one run in directory `out`. A resumed run drops the rows written after its checkpoint, so that its
    files are those of an uninterrupted run (but for the times)."""

    def __init__(self, out, unit, step):
        self.out, self.unit = Path(out), unit
        self.steps = _Table(self.out / "steps.csv", step, [c.replace("items", unit) for c in STEPS])
        self.epochs = _Table(self.out / "epochs.csv", step)
        self.board = _board(self.out / "tensorboard", step)
        self.bar = progress()
        self.since = time.perf_counter()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.bar.stop()
        self.board.close()
        self.steps.close()
        self.epochs.close()

    def start_epoch(self, epoch, done, total):
        self.bar.start_epoch(epoch, done, total)
        self.restart_clock()

    def restart_clock(self):
        """Validation and checkpoints do not count as training time."""
        self.since = time.perf_counter()

    def train(self, rows):
        """rows: (step, epoch, loss, lr, grad_norm or None, items) of the steps since the last call; returns the seconds
        since it"""
        seconds = time.perf_counter() - self.since
        speed = sum(row[-1] for row in rows) / seconds
        for row in rows:
            self.steps.write((*row, round(speed, 1)))
            step, _, loss, lr, norm, _ = row
            for name, value in (("loss", loss), ("lr", lr), ("grad_norm", norm), (f"{self.unit}_per_s", speed)):
                if value is not None:
                    self.board.add_scalar(f"train/{name}", value, step)
        figures = f"loss {rows[-1][2]:.3f}, lr {rows[-1][3]:.3g}, {speed:,.0f} {self.unit}/s"
        self.bar.advance(len(rows), figures)
        self.restart_clock()
        return seconds

    def validation(self, row):
        """row: a dict; one line of epochs.csv and of the terminal"""
        self.epochs.write(list(row.values()), list(row))
        for name, value in row.items():
            if name not in ("step", "epoch"):
                self.board.add_scalar(name.replace("_", "/", 1), float(value), row["step"])
        text = ", ".join(f"{name} {value:.4g}" if isinstance(value, float) else f"{name} {value}"
                         for name, value in row.items())  # fmt: skip
        self.say(text)

    def say(self, text):
        print(text, flush=True)  # rich keeps its bar below it


class NoLog:
    """Of the processes beside the first."""

    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass

    def _nothing(self, *_):
        pass

    start_epoch = restart_clock = validation = say = _nothing

    def train(self, rows):
        return 0.0


def _board(folder, step):
    """TensorBoard's writer; where it is not installed, one that writes nothing."""
    try:
        from torch.utils.tensorboard import SummaryWriter  # a second to import: only where something is trained
    except ImportError:
        print("no TensorBoard log: it needs the Python package tensorboard (pip install tensorboard)", flush=True)
        return _NoBoard()
    return SummaryWriter(folder, purge_step=step + 1)


class _NoBoard:
    def add_scalar(self, *_):
        pass

    def close(self):
        pass


class _Table:
    """A CSV file, line by line; on opening, rows of steps after `step` go. Its first column is the step."""

    def __init__(self, path, step, header=None):
        rows = []
        if step and path.exists():
            with path.open(newline="") as file:
                # The last line may be torn: a killed process wrote half of it.
                rows = [r for r in csv.reader(file) if r and (r[0] == "step" or (r[0].isdigit() and int(r[0]) <= step))]
        temporary = path.with_suffix(".tmp")
        with temporary.open("w", newline="") as file:
            csv.writer(file, lineterminator="\n").writerows(rows or ([header] if header else []))
        os.replace(temporary, path)
        self.file = path.open("a", newline="", buffering=1)
        self.writer, self.empty = csv.writer(self.file, lineterminator="\n"), not rows and not header

    def write(self, values, header=None):
        if self.empty:
            self.writer.writerow(header)
            self.empty = False
        self.writer.writerow(values)

    def close(self):
        self.file.close()
