"""What a flow run leaves when its process is killed, and how it is put in order: `python -m flows.left`.

While a run is at work, a note in Prefect's home names its process and the training it is at. A note whose process is
gone belongs to a run that nobody ended: it is set Crashed, which frees its place in the deployment's limit, and its
MLflow run is closed. Every run of a flow does this when it begins, so nothing has to be removed by hand.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from uuid import UUID

from flows import server

# isort: split
from prefect.client.orchestration import get_client
from prefect.exceptions import ObjectNotFound
from prefect.runtime import flow_run as current_flow_run
from prefect.settings import PREFECT_API_URL
from prefect.states import Crashed

from unidec.data.storage import write_json
from unidec.errors import without_credentials
from unidec.pipeline.runs import close_tracking
from unidec.tracking.lock_holder import is_alive, this_process

log = logging.getLogger("unidec.flows")

# set by flows/__init__.py; absolute, because a run may work in another folder
NOTES = Path(os.environ["PREFECT_HOME"]).resolve() / "unidec-runs"
_WORDS = "its process is gone (killed, or the machine stopped); the next run goes on from the last checkpoint"


def _note(flow_run_id: Any) -> Path:
    """The file that tells others (the next run, hooks in the worker's process) where a flow run is."""
    return NOTES / f"{flow_run_id}.json"


@contextlib.contextmanager
def noted() -> Iterator[None]:
    """While inside, a note says that this process is at the flow run; whatever ends it in order removes the note."""
    note = _note(current_flow_run.id or os.getpid())
    _write(note, None)
    try:
        yield
    finally:
        note.unlink(missing_ok=True)


def note_training(run_dir: str | None) -> None:
    """The training that the flow run is at, for whoever finds its note; None: it has ended."""
    note = _note(current_flow_run.id or os.getpid())
    if note.exists():
        _write(note, str(Path(run_dir).resolve()) if run_dir else None)


def close_training(flow_run_id: Any, status: Any) -> None:
    """Ends the MLflow run of the training that a flow run was at, and removes its note; nothing where there is none."""
    note = _note(flow_run_id)
    about = _read(note)
    if about.get("run_dir"):
        close_tracking(about["run_dir"], status)
    note.unlink(missing_ok=True)


def reconcile() -> list[str]:
    """Sets Crashed the runs of this server and machine whose process is gone; gives their names.

    A server that cannot be reached costs a warning: the notes stay for the next time.
    """
    notes = [(note, _read(note)) for note in sorted(NOTES.glob("*.json"))]
    gone = [note for note, about in notes if about.get("server") == _server() and is_alive(about["holder"]) is False]
    if not gone:
        return []
    names = []
    with get_client(sync_client=True) as client:
        for note in gone:
            try:
                name = _crash(client, note.stem)
            except Exception as error:  # Prefect's client has no common error
                log.warning("flow run %s, whose process is gone, could not be set Crashed: %s", note.stem, error)
                continue
            close_training(note.stem, "KILLED")
            if name:
                names.append(name)
                log.warning("flow run %s is Crashed: %s", name, _WORDS)
    return names


def _crash(client: Any, flow_run_id: str) -> str | None:
    """The name of the run, if it was not at its end."""
    try:
        run = client.read_flow_run(UUID(flow_run_id))
    except (ObjectNotFound, ValueError):  # deleted; or a process without a run
        return None
    if run.state is not None and run.state.is_final():
        return None
    client.set_flow_run_state(run.id, Crashed(message=_WORDS), force=True)
    return str(run.name)


def _write(note: Path, run_dir: str | None) -> None:
    note.parent.mkdir(parents=True, exist_ok=True)
    write_json(note, {"holder": this_process(), "server": _server(), "run_dir": run_dir})


def _server() -> str:
    """Whose run it is; empty: a temporary server on the database in Prefect's home."""
    url = str(PREFECT_API_URL.value() or "")
    return "" if server.is_temporary(url) else without_credentials(url)


def _read(note: Path) -> dict[str, Any]:
    try:
        about = json.loads(note.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return about if isinstance(about, dict) else {}


def main() -> int:
    """`python -m flows.left`: says what it set in order."""
    for name in reconcile():
        print(f"{name}: Crashed, {_WORDS}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
