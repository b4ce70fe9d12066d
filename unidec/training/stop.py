"""Being asked to stop: SIGINT and SIGTERM wait until the step is finished and a checkpoint is written."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

SIGNALS = (signal.SIGINT, signal.SIGTERM)
Handler = Callable[[int, FrameType | None], Any] | int | None


class Stop:
    """What `stop_signals` gives: looked at between two steps.

    Attributes:
        asked: the signal that came (`signal.SIGTERM`), or None as long as nobody asked.
    """

    def __init__(self) -> None:
        self.asked: signal.Signals | None = None
        self._before: dict[signal.Signals, Handler] = {}

    def leave(self) -> None:
        """Give the signals back to whoever had them, and pass on the one that came: they go on as always.

        Raises:
            BaseException: what the former handler raises (KeyboardInterrupt); under SIGTERM's default the process ends.
        """
        asked, self.asked = self.asked, None
        self._restore()
        if asked is not None:
            signal.raise_signal(asked)

    def _take(self) -> None:
        for number in SIGNALS:
            before = signal.getsignal(number)
            # ignored (a background job), or a handler that Python cannot put back: not ours to change
            if before in (signal.SIG_IGN, None):
                continue
            self._before[number] = before
            signal.signal(number, self._come)

    def _restore(self) -> None:
        while self._before:
            signal.signal(*self._before.popitem())

    def _come(self, number: int, _frame: FrameType | None) -> None:
        again, self.asked = self.asked is not None, signal.Signals(number)
        if again:  # whoever asks twice means now
            self.leave()


@contextlib.contextmanager
def stop_signals() -> Iterator[Stop]:
    """Within, the first SIGINT or SIGTERM only sets `stop.asked`; a second one acts at once, as it would outside.

    `with stop_signals() as stop:` train; when `stop.asked`: save, then `stop.leave()`. A signal that nobody looked at
    is passed on at the end; where the block ends by an error, that error goes on instead. Python hands signals to the
    main thread only: in another one nothing is changed, and nobody ever asks.
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
