"""The end of a flow that was started on the command line: one message and one exit code, whatever
Prefect still does.

A flow's result or error is known as soon as its body returns. Prefect then records it, which takes
seconds after Ctrl-C, and minutes if its server is gone."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from flows import server
from unidec.errors import Refused, TrainingError, UnidecError
from unidec.interrupt import stopped
from unidec.progress import say

PREFECT_S = 1.5  # time for Prefect to record the end after a signal, or when its server is gone
LEAVE_S = 24.0  # time to save a checkpoint when Prefect's server is gone
RESUME = "run again to resume from the last checkpoint or finished part"


@dataclass
class Body:
    """How the body of this process's flow ended, if `is_over`; `flows.lifecycle` notes it."""

    is_over: threading.Event = field(default_factory=threading.Event)
    result: Any = None
    error: BaseException | None = None

    def begin(self) -> None:
        self.is_over.clear()
        self.result = None
        self.error = None

    def end(self, error: BaseException | None) -> None:
        self.error = error
        self.is_over.set()


body = Body()


class Ending:
    """Prints the result or the error, once; `code` is then the exit code.

    Args:
        show: the text of a result.
    """

    def __init__(self, show: Callable[[Any], str]) -> None:
        self.show = show
        self.code = 1
        self._reported = threading.Event()
        self._first = threading.Lock()

    def leave_in_time(self) -> None:
        """Start a thread that ends the process soon after a signal, and in any case when Prefect's
        server is gone.
        """
        threading.Thread(target=self._leave_in_time, daemon=True, name="unidec-ending").start()

    def _leave_in_time(self) -> None:
        while not (server.lost.is_set() or _was_stopped()):
            time.sleep(0.1)
        body.is_over.wait(LEAVE_S)
        self._reported.wait(PREFECT_S)
        self.report(body.result, body.error)
        leave(self.code)

    def report(self, result: Any, error: BaseException | None) -> bool:
        """Print the result, or the error if there is one; False: the error is none of ours, and was
        not printed.
        """
        if not self._first.acquire(blocking=False):
            self._reported.wait()
            return True
        is_known = self._report(result, error)
        self._reported.set()
        return is_known

    def _report(self, result: Any, error: BaseException | None) -> bool:
        if server.lost.is_set() and not isinstance(error, UnidecError):
            result, error = _without_server()
        if error is None:
            self.code = _print_result(result, self.show)
            return True
        if not isinstance(error, Exception):
            error = stopped(getattr(error, "signal", signal.SIGINT), RESUME)
        if not isinstance(error, UnidecError):
            return False
        say(str(error))
        self.code = error.exit_code
        return True


def leave(code: int) -> None:
    """End the process now: without waiting for threads, some of which import modules
    for seconds.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _was_stopped() -> bool:
    """Whether a signal ended the body."""
    return (
        body.is_over.is_set() and body.error is not None and not isinstance(body.error, Exception)
    )


def _without_server() -> tuple[Any, BaseException | None]:
    """Result and error of a flow whose server is gone: finished work has not failed."""
    if body.is_over.is_set() and body.error is None:
        say(f"warning: {server.LOST}: Prefect has no record of this run's end")
        return body.result, None
    if isinstance(body.error, UnidecError):
        return None, body.error
    return None, TrainingError(server.LOST, fix=RESUME)


def _print_result(result: Any, show: Callable[[Any], str]) -> int:
    """Print a flow's result; returns the exit code."""
    done = getattr(result, "data", result)  # bodies may return a state of Prefect that holds it
    print(show(done), flush=True)
    if missing := done.get("no_champion"):
        why = " ".join(missing["reason"].split())
        say(
            f"there is no champion: version {missing['version']} was refused ({why}); run: "
            f"{missing['command']}"
        )
        return Refused.exit_code
    return 0
