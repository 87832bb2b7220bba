"""The progress bar of an epoch, a validation or a translation: steps, remaining time, loss, speed.

Without a terminal, or without the package rich, no bar is shown.
"""

import sys
from collections.abc import Iterator, Sequence
from typing import Any, TypeVar

Item = TypeVar("Item")
_shown: "list[Bar]" = []  # the bar on the terminal, which has room for one


def progress() -> "Bar | NoBar":
    """A progress bar on standard error, where that is a terminal."""
    if not sys.stderr.isatty():
        return NoBar()
    try:
        return Bar()
    except ImportError:
        return NoBar()


def watched(items: Sequence[Item], text: str) -> Iterator[Item]:
    """Yields the items, and shows how many have been processed.

    The bar is a line of the bar that is shown already, or one of its own.
    text: what is done with them, e.g. "validation"
    """
    own = not _shown
    bar = progress() if own else _shown[-1]
    try:
        task = bar.start(text, len(items))
        for i in range(len(items)):
            yield items[i]
            bar.done(task)
        bar.remove(task)
    finally:
        if own:
            bar.stop()


class NoBar:
    """The interface of Bar without a display."""

    def stop(self) -> None:
        pass

    def start_epoch(self, epoch: int, done: int, total: int) -> None:
        pass

    def advance(self, steps: int, text: str) -> None:
        pass

    def start(self, text: str, total: int) -> Any:
        pass

    def done(self, task: Any) -> None:
        pass

    def remove(self, task: Any) -> None:
        pass


class Bar:
    """A progress bar of rich."""

    def __init__(self, console: Any = None) -> None:
        """console: where it is shown; by default standard error"""
        from rich.console import Console
        from rich.progress import (
            BarColumn,
            MofNCompleteColumn,
            Progress,
            TextColumn,
            TimeRemainingColumn,
        )

        self.bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeRemainingColumn(),
            TextColumn("{task.fields[text]}"),
            console=console or Console(stderr=True),
            transient=True,
        )
        self.task: Any = None  # of the epochs
        self.bar.start()
        _shown.append(self)

    def stop(self) -> None:
        """Removes the bar from the terminal."""
        if self in _shown:
            _shown.remove(self)
        self.bar.stop()

    def start_epoch(self, epoch: int, done: int, total: int) -> None:
        """Starts the bar of an epoch. epoch: from 0    done, total: steps"""
        if self.task is None:
            self.task = self.bar.add_task("", text="")
        self.bar.reset(self.task, description=f"epoch {epoch + 1}", completed=done, total=total)

    def advance(self, steps: int, text: str) -> None:
        """Advances by a number of steps. text: shown beside the bar"""
        self.bar.update(self.task, advance=steps, text=text)

    def start(self, text: str, total: int) -> Any:
        """Adds a line with a bar for `total` steps of something else; returns what names it."""
        return self.bar.add_task(text, total=total, text="")

    def done(self, task: Any) -> None:
        """Advances a line of `start` by one."""
        self.bar.advance(task)

    def remove(self, task: Any) -> None:
        """Removes a line of `start`."""
        self.bar.remove_task(task)
