"""Stopping: SIGINT and SIGTERM wait until the step is finished and a checkpoint is written."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from types import FrameType
from typing import Any


@dataclass
class Stop:
    """Looked at between two steps: the signal that came, None as long as none came."""

    asked: signal.Signals | None = None


@contextlib.contextmanager
def stop_signals() -> Iterator[Stop]:
    """Within, the first SIGINT or SIGTERM only sets `stop.asked`; a second one acts at once, as it would outside.

    A block that sees `stop.asked` saves and ends; then the signal is passed on (KeyboardInterrupt; under SIGTERM's
    default the process ends). Where the block ends by an error, that error is raised instead. Python hands signals to
    the main thread only: in another one nothing is changed, and none ever comes.
    """
    stop, before = Stop(), dict[int, Any]()

    def restore() -> None:
        while before:
            signal.signal(*before.popitem())

    def come(number: int, _frame: FrameType | None) -> None:
        again, stop.asked = stop.asked is not None, signal.Signals(number)
        if again:
            restore()
            signal.raise_signal(number)

    for number in (signal.SIGINT, signal.SIGTERM) if threading.current_thread() is threading.main_thread() else ():
        handler = signal.getsignal(number)
        # ignored (a background job), or a handler that Python cannot put back: not ours to change
        if handler not in (signal.SIG_IGN, None):
            before[number] = handler
            signal.signal(number, come)
    try:
        yield stop
    finally:
        restore()
    if stop.asked is not None:
        signal.raise_signal(stop.asked)
