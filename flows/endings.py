"""How a flow run ends: its MLflow run told, hooks, signals, errors in one line."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import signal
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from prefect.context import FlowRunContext
from prefect.exceptions import MissingContextError, TerminationSignal
from prefect.logging import get_run_logger
from prefect.runtime import flow_run as current_flow_run

from unidec.errors import UnidecError
from unidec.stages.runs import close_tracking

# set by flows/__init__.py; absolute, because a run may work in another folder
_NOTES = Path(os.environ["PREFECT_HOME"]).resolve() / "unidec-runs"

_on_command_line = False  # set by on_command_line(): this process is ours to end

FAREWELL: dict[type[BaseException], tuple[int, str]] = {
    KeyboardInterrupt: (130, "interrupted: run again to go on from the last checkpoint"),
    TerminationSignal: (143, "terminated: run again to go on from the last checkpoint"),
}


def _note(flow_run_id: Any) -> Path:
    """The file that tells hooks (which may run in the worker's process) which training a flow run is at."""
    return _NOTES / f"{flow_run_id}.json"


def say(line: str) -> None:
    """Into the run's log, which people read on the terminal and on its page; the library's own loggers reach the page
    alone."""
    try:
        get_run_logger().info("%s", line)
    except MissingContextError:
        logging.getLogger("unidec.flows").info("%s", line)


def hook(status: str) -> Callable[..., None]:
    def end(_flow: Any, flow_run: Any, _state: Any) -> None:
        note = _note(flow_run.id)
        if note.is_file():
            about = json.loads(note.read_text(encoding="utf-8"))
            close_tracking(about["run_dir"], status)
            note.unlink(missing_ok=True)

    end.__name__ = f"mlflow_run_{status.lower()}"
    return end


@contextlib.contextmanager
def tracked(run_dir: str) -> Iterator[None]:
    """The MLflow run ends as what happened inside: also for Ctrl-C, when there may be no server left to run a hook."""
    note = _note(current_flow_run.id or os.getpid())
    note.parent.mkdir(parents=True, exist_ok=True)
    note.write_text(json.dumps({"run_dir": str(Path(run_dir).resolve())}), encoding="utf-8")
    try:
        yield
    except BaseException as error:
        close_tracking(run_dir, "FAILED" if isinstance(error, Exception) else "KILLED")
        note.unlink(missing_ok=True)
        raise
    close_tracking(run_dir, "FINISHED")
    note.unlink(missing_ok=True)


def leave_if_server_left(error: BaseException, words: str | None = None) -> None:
    """Ctrl-C reaches Prefect's temporary server too, and without it Prefect tries to report for minutes: end here then.

    Training has stopped and the MLflow run is closed when this is called; the system lets go of the lock. Only within
    `on_command_line`: elsewhere the process is not ours to end.
    """
    context = FlowRunContext.get()
    if not _on_command_line or context is None:
        return
    for _ in range(10):  # it takes a moment to go, if it goes
        try:
            urllib.request.urlopen(f"{str(context.client.api_url).rstrip('/')}/health", timeout=1).close()
        except OSError:
            print(words or FAREWELL[type(error)][1], file=sys.stderr, flush=True)
            os._exit(FAREWELL[type(error)][0])
        time.sleep(0.3)


def on_command_line(run: Callable[[], Any], words: str | None = None) -> int:
    """Runs a flow as a program does: errors in one line, an exit code, Ctrl-C and SIGTERM leave cleanly.

    Args:
        run: calls the flow; what it returns is printed as JSON.
        words: the farewell when it is stopped.
    """
    global _on_command_line
    _on_command_line = True
    # Prefect hands SIGTERM back to whoever had it: by default that kills us before its temporary server is stopped
    before = signal.signal(signal.SIGTERM, terminate)
    one_line_for_known_errors()
    try:
        done = run()
    except UnidecError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    except (KeyboardInterrupt, TerminationSignal) as error:
        code, usual = FAREWELL[type(error)]
        print(words or usual, file=sys.stderr)
        return code
    finally:
        _on_command_line = False
        signal.signal(signal.SIGTERM, before)
    print(json.dumps(done, indent=2))
    return 0


def terminate(number: int, _frame: Any) -> None:
    raise TerminationSignal(signal=number)


class _OneLine(logging.Filter):
    """Prefect logs a traceback for every error: one that says what, where and how to fix it needs none."""

    def filter(self, record: logging.LogRecord) -> bool:
        error = record.exc_info[1] if record.exc_info else None
        if isinstance(error, UnidecError):
            record.msg, record.args = "stopped: %s", (str(error),)
            record.exc_info, record.exc_text = None, None
        return True


def one_line_for_known_errors() -> None:
    for name in ("prefect.flow_runs", "prefect.task_runs"):
        logger = logging.getLogger(name)
        if not any(isinstance(known, _OneLine) for known in logger.filters):
            logger.addFilter(_OneLine())
