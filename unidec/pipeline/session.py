"""A whole training in this process: begun or gone on with, round by round, ended in order whatever ends it."""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection
from typing import Any

from unidec.config import Params
from unidec.pipeline import launch, runs, training
from unidec.pipeline.interrupts import signals_raise
from unidec.pipeline.lock import one_at_a_time

_AGAIN = "run the same command again to go on from the last checkpoint"
_FAREWELL = "left at once; the last whole checkpoint is kept"


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
    with signals_raise(_AGAIN, _FAREWELL), launch.led(params) as leading:
        if not leading:
            return {}
        with one_at_a_time():
            state = training.start_run(params, resume, accept)
            for line in state.pop("lines"):
                say(line)
            run_dir = state["run_dir"]
            with runs.tracked(run_dir):
                while not state["finished"]:
                    training.refresh(params, run_dir)
                    state = {**state, **training.train_round(params, run_dir)}
                return {**state, **training.export(params, run_dir)}
