"""Runs whose process died, and what processes that ended left unsent."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from unidec.tracking.lock_holder import is_alive
from unidec.tracking.outbox import Outbox
from unidec.tracking.run import Tracker, tracking_state


def has_died(run_dir: Path) -> bool:
    """Whether the MLflow run of a training folder was never ended although the process that held it is gone."""
    state = tracking_state(run_dir)
    return "holder" in state and state.get("status") is None and is_alive(state["holder"]) is False


def reconcile_runs(run_dirs: Iterable[Path]) -> list[str]:
    """End the runs whose process died as KILLED, and send what other ended runs have in their outbox.

    Args:
        run_dirs: training folders, also such that never tracked anything.

    Returns:
        names of the folders whose run was ended; what a store that is away did not take waits on.
    """
    ended = []
    for run_dir in run_dirs:
        if has_died(run_dir):
            Tracker.resume(run_dir).finish("KILLED")
            ended.append(run_dir.name)
        elif Outbox(run_dir) and tracking_state(run_dir).get("status"):
            Tracker.resume(run_dir).flush(force=True)
    return ended
