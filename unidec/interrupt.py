"""SIGINT and SIGTERM stop work cleanly: one line and an exit code instead of a traceback. A
training first finishes its step and writes a checkpoint.

Importing this module also covers the start-up of unidec's programs, until `main` calls `guard_work`
or `end_guard`."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import FrameType
from typing import TYPE_CHECKING, NoReturn

if TYPE_CHECKING:
    from unidec.errors import Stopped

# noted before slow imports, during which that process may end
STARTED_BY = os.getppid()
EXIT_CODE = 130
EXIT_CODES: dict[int, int] = {signal.SIGINT: EXIT_CODE, signal.SIGTERM: 143}


class Interrupted(BaseException):
    """Ctrl-C during a command; click would print "Aborted!" and exit with 1 for a
    KeyboardInterrupt.
    """


class _Signal(BaseException):
    """Unwinds the stack after a signal; a BaseException, so that no `except Exception`
    catches it.
    """


def guard_work() -> None:
    """Make Ctrl-C raise `Interrupted`; during an import, which may catch it, Ctrl-C ends the
    process.
    """
    if signal.getsignal(signal.SIGINT) is _leave:
        signal.signal(signal.SIGINT, _interrupt)


def end_guard() -> None:
    """Make Ctrl-C raise KeyboardInterrupt, as in any other program."""
    if signal.getsignal(signal.SIGINT) is _leave:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@contextlib.contextmanager
def signals_raise(again: str, farewell: str) -> Iterator[None]:
    """Make SIGTERM and Ctrl-C stop the block cleanly; a second signal ends the process at once.

    This has no effect outside the main thread, or on signals that are ignored.

    Args:
        again: end of the error message, which says what running the command again does.
        farewell: printed when a second signal ends the process.

    Raises:
        Stopped: a signal arrived.
    """
    received: list[int] = []

    def receive(number: int, _frame: FrameType | None) -> None:
        received.append(number)
        # child processes notice that their parent has ended (unidec.pipeline.parent_watch)
        if len(received) > 1:
            print(farewell, file=sys.stderr, flush=True)
            os._exit(EXIT_CODES[number])
        raise _Signal

    try:
        with _receiving(receive):
            yield
    except _Signal:
        raise stopped(received[0], again) from None


def stopped(number: int, again: str) -> Stopped:
    """The error of work that this signal stopped; `again` says what running the command again
    does.
    """
    from unidec.errors import Stopped

    what = "interrupted" if number == signal.SIGINT else "terminated"
    return Stopped(f"{what}: {again}", EXIT_CODES[number])


@dataclass
class Stop:
    """State that a block of work checks between steps: `asked` is the signal that
    arrived, or None.
    """

    asked: signal.Signals | None = None


@contextlib.contextmanager
def stop_signals() -> Iterator[Stop]:
    """Within the block, the first SIGINT or SIGTERM only sets `stop.asked`; a second one takes
    effect at once.

    When `stop.asked` is set, the block should save its state and return. The signal is then raised
    again (KeyboardInterrupt; with SIGTERM's default handler the process ends). If the block raises
    an error, that error is raised instead. In other threads than the main thread this has no
    effect, because Python delivers no signals there."""
    stop = Stop()

    def receive(number: int, _frame: FrameType | None) -> None:
        is_second = stop.asked is not None
        stop.asked = signal.Signals(number)
        if is_second:
            handlers.close()
            signal.raise_signal(number)

    with _receiving(receive) as handlers:
        yield stop
    if stop.asked is not None:
        signal.raise_signal(stop.asked)


def _receiving(receive: Callable[[int, FrameType | None], None]) -> contextlib.ExitStack:
    """Make `receive` handle SIGINT and SIGTERM, until the result is closed; only in the main
    thread, as no other one can.

    A handler is not replaced if it ignores the signal (background jobs), or if Python could not
    restore it."""
    handlers = contextlib.ExitStack()
    if threading.current_thread() is not threading.main_thread():
        return handlers
    for number in EXIT_CODES:
        before = signal.getsignal(number)
        if before not in (signal.SIG_IGN, None):
            handlers.callback(signal.signal, number, before)
            signal.signal(number, receive)
    return handlers


def _leave(_number: int, _frame: FrameType | None) -> NoReturn:
    os.write(2, b"interrupted\n")
    os._exit(EXIT_CODE)


def _interrupt(number: int, frame: FrameType | None) -> None:
    outer = frame
    while outer is not None:
        if "importlib._bootstrap" in outer.f_code.co_filename:
            _leave(number, frame)
        outer = outer.f_back
    raise Interrupted


# no effect when another program imports this package
IS_PROGRAM = sys.argv[0] == "-m" or os.path.basename(sys.argv[0]) == "unidec"
if IS_PROGRAM and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
    signal.signal(signal.SIGINT, _leave)
