"""What processes that are gone left unsent: runs that never ended, figures and files of a time without a server."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from unidec.tracking.lock_holder import is_alive, tracking_state
from unidec.tracking.run import Tracker
from unidec.tracking.spool import FILES, PENDING
from unidec.tracking.store import Outage


def send_left(run_dirs: Iterable[Path]) -> list[str]:
    """Sends what waits in training folders that no process works on; a run that was never ended ends as KILLED.

    Args:
        run_dirs: training folders, also such that never tracked anything.

    Returns:
        names of the folders of which something was sent; what a store that is away did not take waits on.
    """
    sent = []
    for run_dir in run_dirs:
        state = tracking_state(run_dir)
        is_left = bool(state.get("holder")) and state.get("status") is None and is_alive(state["holder"]) is False
        if not is_left and not (state.get("status") and _waits(run_dir, state)):
            continue
        if not is_left and Outage.of(state["uri"]):  # of this process's trackers one asked in vain a moment ago
            continue
        tracker = Tracker.resume(run_dir)
        if is_left:
            tracker.finish("KILLED")
        else:
            tracker.flush(force=True)
        if tracker.run_id and not _waits(run_dir, tracking_state(run_dir)):
            sent.append(run_dir.name)
    return sent


def _waits(run_dir: Path, state: dict[str, object]) -> bool:
    unsent = state.get("files") or state.get("tags_sent") is False or state.get("status_sent") is False
    return bool(unsent) or (run_dir / PENDING).exists() or (run_dir / FILES).exists()
