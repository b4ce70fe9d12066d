"""Stopping: SIGINT and SIGTERM wait until the step is finished and a checkpoint is written."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator
from types import FrameType
from typing import Any


class Stop:
    """What `stop_signals` gives: looked at between two steps.

    Attributes:
        asked: the signal that came (`signal.SIGTERM`), or None as long as none came.
    """

    def __init__(self) -> None:
        self.asked: signal.Signals | None = None
        self._before: dict[signal.Signals, Any] = {}

    def leave(self) -> None:
        """Restore the former handlers, and pass on the signal that came.

        Raises:
            BaseException: what the former handler raises (KeyboardInterrupt); under SIGTERM's default the process ends.
        """
        asked, self.asked = self.asked, None
        self._restore()
        if asked is not None:
            signal.raise_signal(asked)

    def _take(self) -> None:
        for number in (signal.SIGINT, signal.SIGTERM):
            before = signal.getsignal(number)
            # ignored (a background job), or a handler that Python cannot put back: not ours to change
            if before not in (signal.SIG_IGN, None):
                self._before[number] = before
                signal.signal(number, self._come)

    def _restore(self) -> None:
        while self._before:
            signal.signal(*self._before.popitem())

    def _come(self, number: int, _frame: FrameType | None) -> None:
        again, self.asked = self.asked is not None, signal.Signals(number)
        if again:  # a second signal acts at once
            self.leave()


@contextlib.contextmanager
def stop_signals() -> Iterator[Stop]:
    """Within, the first SIGINT or SIGTERM only sets `stop.asked`; a second one acts at once, as it would outside.

    `with stop_signals() as stop:` train; when `stop.asked`: save, then `stop.leave()`. A signal that was not handled
    is passed on at the end; where the block ends by an error, that error is raised instead. Python hands signals to the
    main thread only: in another one nothing is changed, and none ever comes.
    """
    stop = Stop()
    if threading.current_thread() is threading.main_thread():
        stop._take()
    try:
        yield stop
    except BaseException:
        stop._restore()
        raise
    stop.leave()
