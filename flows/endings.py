"""How a flow run begins and ends: its note, tags, hooks, signals, errors in one line, and the name of its state."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import signal
import sys
from collections.abc import Callable, Iterator
from typing import Any

from prefect.context import FlowRunContext
from prefect.exceptions import CancelledRun, MissingContextError, TerminationSignal
from prefect.logging import get_run_logger
from prefect.runtime import deployment
from prefect.runtime import flow_run as current_flow_run
from prefect.states import Cancelled, Completed

from flows import left, server
from unidec import interrupt
from unidec.errors import Refused, UnidecError, without_credentials
from unidec.pipeline.parent_watch import watch
from unidec.pipeline.runs import close_tracking
from unidec.tracking.run import RUN_TAGS

FAREWELL: dict[type[BaseException], tuple[int, str]] = {
    KeyboardInterrupt: (130, "interrupted: run again to go on from the last checkpoint"),
    TerminationSignal: (143, "terminated: run again to go on from the last checkpoint"),
}


def say(line: str) -> None:
    """Into the run's log, which people read on the terminal and on its page; the library's own loggers reach the page
    alone."""
    try:
        get_run_logger().info("%s", line)
    except MissingContextError:
        logging.getLogger("unidec.flows").info("%s", line)


def hook(status: str) -> Callable[..., None]:
    def end(_flow: Any, flow_run: Any, _state: Any) -> None:
        left.close_training(flow_run.id, status)

    end.__name__ = f"mlflow_run_{status.lower()}"
    return end


@contextlib.contextmanager
def at_work() -> Iterator[None]:
    """Around a flow's body: what killed runs left is put in order, others can see who is at work, tools know the run.

    Started by a worker, the run ends when the worker is gone: nobody could cancel it any more.
    """
    one_line_for_known_errors()
    context = FlowRunContext.get()
    if context is None:
        yield
        return
    left.reconcile()
    if context.flow_run is not None and context.flow_run.deployment_id and "PREFECT__FLOW_RUN_ID" in os.environ:
        sys.stdout, sys.stderr = _Unheard(sys.stdout), _Unheard(sys.stderr)
        watch(os.getppid())
    with left.noted(), _tagged():
        yield


class _Unheard:
    """A stream that a worker reads: once it is gone, lines go nowhere; they do not end the training that says them."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        with contextlib.suppress(BrokenPipeError):
            self._stream.write(text)
        return len(text)

    def flush(self) -> None:
        with contextlib.suppress(BrokenPipeError):
            self._stream.flush()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


@contextlib.contextmanager
def _tagged() -> Iterator[None]:
    """MLflow's runs and versions that are made meanwhile name the flow run."""
    before = os.environ.get(RUN_TAGS)
    tags = {"prefect.flow_run_id": str(current_flow_run.id), "prefect.flow_run_name": current_flow_run.name}
    url = without_credentials(str(current_flow_run.ui_url or ""))
    if url.startswith("http"):  # a temporary server has no page
        tags["prefect.flow_run_url"] = url
    if deployment.name:
        tags["prefect.deployment"] = f"{current_flow_run.flow_name}/{deployment.name}"
    os.environ[RUN_TAGS] = json.dumps({**json.loads(before or "{}"), **tags})
    try:
        yield
    finally:
        if before is None:
            del os.environ[RUN_TAGS]
        else:
            os.environ[RUN_TAGS] = before


@contextlib.contextmanager
def tracked(run_dir: str) -> Iterator[None]:
    """The MLflow run ends as what happened inside: also for Ctrl-C, when there may be no server left to run a hook."""
    left.note_training(run_dir)
    try:
        yield
    except BaseException as error:
        close_tracking(run_dir, "FAILED" if isinstance(error, Exception) else "KILLED")
        raise
    finally:
        left.note_training(None)
    close_tracking(run_dir, "FINISHED")


def named(done: dict[str, Any]) -> Any:
    """What a flow returns: Skipped or Refused are names of its state, so that a list of runs says what came of each.

    Args:
        done: with "skipped" or "refused": why.
    """
    name = next((name for name in ("skipped", "refused") if name in done), None)
    if name is None or FlowRunContext.get() is None:
        return done
    return Completed(name=name.capitalize(), message=str(done[name])[:2000], data=done)


def turned_away(reason: str | UnidecError) -> Any:
    """The end of a run that has no turn, because another is at work or did its work: Cancelled, with the reason.

    Raises:
        UnidecError: the reason, where nobody scheduled the run: its caller wants to know.
    """
    context = FlowRunContext.get()
    deployed = context is not None and context.flow_run is not None and context.flow_run.deployment_id is not None
    if isinstance(reason, UnidecError) and not deployed:
        raise reason
    say(f"nothing is done: {reason}")
    return Cancelled(message=str(reason))


def as_json(done: Any) -> str:
    """For programs that read what a flow returns."""
    return json.dumps(done, indent=2)


def on_command_line(
    run: Callable[[], Any],
    words: str | None = None,
    show: Callable[[Any], str] = as_json,
    meanwhile: Callable[[], object] = lambda: None,
) -> int:
    """Runs a flow as a program does: errors in one line, an exit code, Ctrl-C and SIGTERM leave cleanly.

    A run that the gate leaves without a champion ends with exit code 6 and a last line that says how to change it.

    Args:
        run: calls the flow.
        words: the farewell when it is stopped.
        show: what is printed of the flow's result.
        meanwhile: called while Prefect's temporary server starts.
    """
    interrupt.end_guard()
    # Prefect hands SIGTERM back to whoever had it: by default that kills us before its temporary server is stopped
    before = signal.signal(signal.SIGTERM, terminate)
    one_line_for_known_errors()
    try:
        with server.running(meanwhile):
            done = run()
    except UnidecError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    except (KeyboardInterrupt, TerminationSignal) as error:
        code, usual = FAREWELL[type(error)]
        print(words or usual, file=sys.stderr)
        return code
    finally:
        signal.signal(signal.SIGTERM, before)
    print(show(done), flush=True)
    if missing := done.get("no_champion"):
        why = " ".join(missing["reason"].split())
        words = f"there is no champion: version {missing['version']} was refused ({why}); run: {missing['command']}"
        print(words, file=sys.stderr)
        return Refused.exit_code
    return 0


def terminate(number: int, _frame: Any) -> None:
    raise TerminationSignal(signal=number)


class _OneLine(logging.Filter):
    """Without Prefect's tracebacks of errors that say what, where and how to fix it, and without its farewell, which
    would follow a run's last line."""

    def filter(self, record: logging.LogRecord) -> bool:
        if str(record.msg).startswith("Stopping temporary server"):
            return False
        error = record.exc_info[1] if record.exc_info else None
        if isinstance(error, UnidecError | CancelledRun):  # the latter: a run that turned itself away
            record.msg, record.args = "stopped: %s", (str(error),)
            record.exc_info, record.exc_text = None, None
        return True


def one_line_for_known_errors() -> None:
    for name in ("prefect", "prefect.flow_runs", "prefect.task_runs", "prefect.engine"):
        logger = logging.getLogger(name)
        if not any(isinstance(known, _OneLine) for known in logger.filters):
            logger.addFilter(_OneLine())
