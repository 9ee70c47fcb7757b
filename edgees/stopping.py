"""Ctrl-C, and a polite kill: asked for once, a stop comes where nothing is half done; asked for twice, at once."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from edgees.errors import Interrupted


class Stop:
    """Ctrl-C once: stop when the member at work has finished; twice: at once, unless that is under way already."""

    def __init__(self) -> None:
        self.asked = 0
        self.leaving = False

    def handle(self, *_: object) -> None:
        self.asked += 1
        if self.asked > 1 and not self.leaving:
            self.leaving = True
            raise KeyboardInterrupt

    def check(self) -> None:
        if self.asked:
            self.leaving = True
            raise Interrupted("interrupted")


@contextmanager
def stop_on_signal(stop: Stop) -> Iterator[None]:
    """SIGINT and SIGTERM ask for a stop instead of tearing through whatever is being written."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, stop.handle) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
