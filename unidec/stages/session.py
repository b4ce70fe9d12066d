"""A whole training in this process: begun or gone on with, round by round, ended in order whatever ends it."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
from collections.abc import Callable, Collection, Iterator
from types import FrameType
from typing import Any, NoReturn

from unidec.config import Params
from unidec.errors import Stopped
from unidec.stages import launch, runs, training

EXIT_CODES = {signal.SIGINT: 130, signal.SIGTERM: 143}


class _Signal(BaseException):
    """A signal that takes effect: no `except Exception` on the way may hold it up."""

    def __init__(self, number: signal.Signals):
        self.number = number


def train(
    params: Params,
    resume: str | None = None,
    accept: Collection[str] = (),
    say: Callable[[str], None] = lambda line: print(line, file=sys.stderr),
) -> dict[str, Any]:
    """Train to the last epoch and export the model; killed or stopped, the same call goes on from the checkpoint.

    Args:
        params: all parameters.
        resume: a run to go on with, by its name; "": the newest unfinished one; None: the one of these parameters.
        accept: keys of the run's identity that may differ.
        say: is told where it goes on.

    Returns:
        what the last stages returned; {} on ranks that only follow (under torchrun).

    Raises:
        Stopped: by SIGINT or SIGTERM; a checkpoint is written and the MLflow run has ended as KILLED.
        UnidecError: parameters, data, artifacts or training are wrong.
    """
    with _signals_raise(), launch.led(params) as leading:
        if not leading:
            return {}
        with runs.one_at_a_time():
            state = training.start_run(params, resume, accept)
            for line in state.pop("lines"):
                say(line)
            run_dir = state["run_dir"]
            with runs.tracked(run_dir):
                while not state["finished"]:
                    training.refresh(params, run_dir)
                    state = {**state, **training.train_round(params, run_dir)}
                return {**state, **training.export(params, run_dir)}


@contextlib.contextmanager
def _signals_raise() -> Iterator[None]:
    """SIGTERM ends what is inside in order, as Ctrl-C does; one that comes while things are closed ends it at once."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    came: list[signal.Signals] = []

    def come(number: int, _frame: FrameType | None) -> None:
        came.append(signal.Signals(number))
        if len(came) > 1:
            _leave_now(came[-1])
        raise _Signal(came[0])

    before = {n: signal.getsignal(n) for n in EXIT_CODES if signal.getsignal(n) not in (signal.SIG_IGN, None)}
    for number in before:
        signal.signal(number, come)
    try:
        yield
    except _Signal as caught:
        words = "interrupted" if caught.number == signal.SIGINT else "terminated"
        raise Stopped(
            f"{words}: run the same command again to go on from the last checkpoint",
            EXIT_CODES[caught.number],
        ) from None
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _leave_now(number: signal.Signals) -> NoReturn:
    print("left at once; the last whole checkpoint is kept", file=sys.stderr, flush=True)
    os._exit(EXIT_CODES[number])
