"""Ends a run cleanly when it receives a signal."""

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

HINT = b"\nstopping after this step or validation, with a checkpoint; again to stop at once\n"


class Interruption:
    """Records whether a signal has asked the run to end, as the attribute `requested`."""

    def __init__(self) -> None:
        self.requested = False

    @contextmanager
    def on_signal(self) -> Iterator[None]:
        """Sets `requested` at the first SIGINT, SIGTERM or SIGHUP inside the block.

        The run then ends at the next step boundary, with a checkpoint. A second signal raises
        KeyboardInterrupt at once. SIGHUP, which the end of a terminal sends, stays ignored where it
        is, as under nohup. Outside the main thread signals are not handled.
        """
        if threading.current_thread() is not threading.main_thread():
            yield
            return

        # Asked now, because a terminal that has ended is no terminal any more.
        terminals = [number for number in (1, 2) if os.isatty(number)]

        def stop(number: int, frame: FrameType | None) -> None:
            if number == signal.SIGHUP:
                _silence(terminals)
            if self.requested:
                # The end of a terminal may send SIGHUP more than once.
                if number != signal.SIGHUP:
                    raise KeyboardInterrupt
                return
            self.requested = True
            os.write(2, HINT)  # print is not safe in a signal handler

        numbers = [signal.SIGINT, signal.SIGTERM]
        if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:
            numbers.append(signal.SIGHUP)
        previous = {number: signal.signal(number, stop) for number in numbers}
        try:
            yield
        finally:
            for number, handler in previous.items():
                signal.signal(number, handler)


def _silence(descriptors: list[int]) -> None:
    """Connects descriptors to /dev/null: writing to a terminal that has ended would raise."""
    null = os.open(os.devnull, os.O_WRONLY)
    for descriptor in descriptors:
        os.dup2(null, descriptor)
    os.close(null)
