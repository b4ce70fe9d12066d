"""Ctrl-C from a program's first moment: a line and exit code 130, not a traceback of what is being imported.

Importing this module guards the start of our programs until `main` calls `guard_work` or `end_guard`.
"""

from __future__ import annotations

import os
import signal
import sys
from types import FrameType
from typing import NoReturn

EXIT_CODE = 130


class Interrupted(BaseException):
    """Ctrl-C during a command; click would print "Aborted!" and exit with 1 for a KeyboardInterrupt."""


def _guard_start() -> None:
    """Nothing is changed where another program imports this package."""
    is_program = sys.argv[0] == "-m" or os.path.basename(sys.argv[0]) == "unidec"
    if is_program and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _leave)


def guard_work() -> None:
    """From now on Ctrl-C raises `Interrupted`; inside an import, which may swallow it, it ends the process."""
    if signal.getsignal(signal.SIGINT) is _leave:
        signal.signal(signal.SIGINT, _interrupt)


def end_guard() -> None:
    """From now on Ctrl-C raises KeyboardInterrupt, as in any other program."""
    if signal.getsignal(signal.SIGINT) is _leave:
        signal.signal(signal.SIGINT, signal.default_int_handler)


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


_guard_start()
