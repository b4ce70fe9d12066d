"""How a flow run begins and ends: its process and tags, errors in one line, exit codes, and the name of its state."""

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

from flows import reconcile, server
from unidec import interrupt
from unidec.errors import Refused, TrainingError, UnidecError, without_credentials
from unidec.pipeline.lock import one_at_a_time
from unidec.pipeline.parent_watch import watch
from unidec.tracking.run import RUN_TAGS


def say(line: str) -> None:
    """Log a line of the run: on the terminal and on its page. The library's own loggers reach the page alone."""
    try:
        get_run_logger().info("%s", line)
    except MissingContextError:
        logging.getLogger("unidec.flows").info("%s", line)


@contextlib.contextmanager
def at_work() -> Iterator[None]:
    """Around a flow's body: crashed and late runs are reconciled, and MLflow's runs name this flow run.

    Started by a worker, the run ends when the worker is gone: no one could cancel it any more.
    """
    one_line_for_known_errors()
    context = FlowRunContext.get()
    if context is None or context.flow_run is None:
        yield
        return
    run = context.flow_run
    reconcile.reconcile_crashed_runs()
    reconcile.note_process(run)
    if run.deployment_id:
        reconcile.cancel_late_runs(run)
        if "PREFECT__FLOW_RUN_ID" in os.environ:
            sys.stdout, sys.stderr = _WorkerStream(sys.stdout), _WorkerStream(sys.stderr)
            watch(os.getppid())
    with environment(RUN_TAGS, json.dumps(_tags())):
        yield


class _WorkerStream:
    """A stream that a worker reads: once the worker is gone, lines are dropped and do not end the training."""

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
def environment(name: str, value: str) -> Iterator[None]:
    """Inside, an environment variable has this value."""
    before = os.environ.get(name)
    os.environ[name] = value
    try:
        yield
    finally:
        del os.environ[name]
        if before is not None:
            os.environ[name] = before


def _tags() -> dict[str, str]:
    """Tags for MLflow's runs and versions that are made meanwhile: they name the flow run."""
    tags = json.loads(os.environ.get(RUN_TAGS, "{}"))
    tags |= {"prefect.flow_run_id": str(current_flow_run.id), "prefect.flow_run_name": current_flow_run.name}
    url = without_credentials(str(current_flow_run.ui_url or ""))
    if url.startswith("http"):  # a temporary server has no page
        tags["prefect.flow_run_url"] = url
    if deployment.name:
        tags["prefect.deployment"] = f"{current_flow_run.flow_name}/{deployment.name}"
    return tags


def alone(work: Callable[[], dict[str, Any]]) -> Any:
    """What a flow returns that does its work while no other run of this project does.

    Where the result has "skipped" or "refused" (why), that is the name of the run's state. A deployment's run that has
    no turn ends as Cancelled.

    Raises:
        TrainingError: another is at work, and no deployment started this run: its caller wants to know.
    """
    context = FlowRunContext.get()
    run = context and context.flow_run
    with contextlib.ExitStack() as stack:
        try:
            stack.enter_context(one_at_a_time())
        except TrainingError as error:
            if run is None or run.deployment_id is None:
                raise
            say(f"nothing is done: {error}")
            return Cancelled(message=str(error))
        done = work()
    name = next((name for name in ("skipped", "refused") if name in done), None)
    if name is None or run is None:
        return done
    return Completed(name=name.capitalize(), message=str(done[name])[:2000], data=done)


def as_json(done: Any) -> str:
    """For programs that read what a flow returns."""
    return json.dumps(done, indent=2)


def on_command_line(
    run: Callable[[], Any],
    words: str | None = None,
    show: Callable[[Any], str] = as_json,
    meanwhile: Callable[[], object] = lambda: None,
) -> int:
    """Run a flow as a program does: errors in one line, an exit code, Ctrl-C and SIGTERM leave cleanly.

    A run that the gate leaves without a champion ends with exit code 6; its last line has the command to run.

    Args:
        run: calls the flow.
        words: the farewell when it is stopped.
        show: what is printed of the flow's result.
        meanwhile: called while Prefect's temporary server starts.
    """
    interrupt.end_guard()
    # Prefect hands SIGTERM back to the previous handler: the default would end us before its temporary server stops
    before = signal.signal(signal.SIGTERM, _terminate)
    one_line_for_known_errors()
    try:
        with server.running(meanwhile):
            done = run()
    except UnidecError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    except (KeyboardInterrupt, TerminationSignal) as error:
        is_interrupt = isinstance(error, KeyboardInterrupt)
        usual = f"{'interrupted' if is_interrupt else 'terminated'}: run again to resume from the last checkpoint"
        print(words or usual, file=sys.stderr)
        return 130 if is_interrupt else 143
    finally:
        signal.signal(signal.SIGTERM, before)
    print(show(done), flush=True)
    if missing := done.get("no_champion"):
        why = " ".join(missing["reason"].split())
        words = f"there is no champion: version {missing['version']} was refused ({why}); run: {missing['command']}"
        print(words, file=sys.stderr)
        return Refused.exit_code
    return 0


def _terminate(number: int, _frame: Any) -> None:
    raise TerminationSignal(signal=number)


class _OneLine(logging.Filter):
    """Known errors without Prefect's tracebacks, and no farewell of its temporary server after a run's last line."""

    def filter(self, record: logging.LogRecord) -> bool:
        if str(record.msg).startswith("Stopping temporary server"):
            return False
        error = record.exc_info[1] if record.exc_info else None
        if isinstance(error, UnidecError | CancelledRun):  # the latter: a run that turned itself away
            record.msg, record.args = "stopped: %s", (str(error),)
            record.exc_info, record.exc_text = None, None
        return True


def one_line_for_known_errors() -> None:
    """Install `_OneLine` in Prefect's loggers, once."""
    for name in ("prefect", "prefect.flow_runs", "prefect.task_runs", "prefect.engine"):
        logger = logging.getLogger(name)
        if not any(isinstance(known, _OneLine) for known in logger.filters):
            logger.addFilter(_OneLine())
