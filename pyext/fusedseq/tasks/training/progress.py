"""The bar of an epoch on the terminal: steps, time that remains, figures. Without rich, or a terminal, there is none."""

import sys


def progress():
    if not sys.stderr.isatty():
        return NoBar()
    try:
        return Bar()
    except ImportError:
        print("no progress bar: it needs the Python package rich (pip install rich)", flush=True)
        return NoBar()


class NoBar:
    def stop(self):
        pass

    def start_epoch(self, epoch, done, total):
        pass

    def advance(self, steps, figures):
        pass


class Bar:
    def __init__(self):
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

        self.bar = Progress(
            TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn(),
            TextColumn("{task.fields[figures]}"), console=Console(stderr=True), transient=True,
        )  # fmt: skip
        self.task = self.bar.add_task("", figures="")
        self.bar.start()

    def stop(self):
        self.bar.stop()

    def start_epoch(self, epoch, done, total):
        self.bar.reset(self.task, description=f"epoch {epoch + 1}", completed=done, total=total)

    def advance(self, steps, figures):
        self.bar.update(self.task, advance=steps, figures=figures)
