"""SIGINT and SIGTERM end work in order, whatever it was; a second one ends it at once."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
from collections.abc import Iterator
from types import FrameType
from typing import NoReturn

from unidec.errors import Stopped

EXIT_CODES = {signal.SIGINT: 130, signal.SIGTERM: 143}


class _Signal(BaseException):
    """A signal that takes effect: no `except Exception` on the way may hold it up."""

    def __init__(self, number: signal.Signals):
        self.number = number


@contextlib.contextmanager
def signals_raise(again: str, farewell: str = "") -> Iterator[None]:
    """SIGTERM ends what is inside in order, as Ctrl-C does; one that comes while things are closed ends it at once.

    Elsewhere than in the main thread, and for signals that are ignored, nothing is changed.

    Args:
        again: what running the same command again does, for the message.
        farewell: printed when a second signal leaves at once; "": nothing.

    Raises:
        Stopped: the signal came.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    came: list[signal.Signals] = []

    def come(number: int, _frame: FrameType | None) -> None:
        came.append(signal.Signals(number))
        if len(came) > 1:
            _leave_now(came[-1], farewell)
        raise _Signal(came[0])

    before = {n: signal.getsignal(n) for n in EXIT_CODES if signal.getsignal(n) not in (signal.SIG_IGN, None)}
    for number in before:
        signal.signal(number, come)
    try:
        yield
    except _Signal as caught:
        words = "interrupted" if caught.number == signal.SIGINT else "terminated"
        raise Stopped(f"{words}: {again}", EXIT_CODES[caught.number]) from None
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _leave_now(number: signal.Signals, farewell: str) -> NoReturn:
    # children see that their parent is gone, and end (unidec.pipeline.parent_watch)
    if farewell:
        print(farewell, file=sys.stderr, flush=True)
    os._exit(EXIT_CODES[number])
