"""Parts that all flows share: steps as tasks with retries, tags, states, one-line errors, end of
orphaned processes.
"""

from __future__ import annotations

import contextlib
import functools
import json
import logging
import os
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

from prefect import task
from prefect.cache_policies import NO_CACHE
from prefect.context import FlowRunContext
from prefect.exceptions import CancelledRun, MissingContextError
from prefect.logging import get_run_logger
from prefect.runtime import deployment
from prefect.runtime import flow_run as current_flow_run
from prefect.states import Cancelled, Completed

from flows import ending, publish, reconcile
from unidec.addresses import without_credentials
from unidec.errors import TrainingError, UnidecError, system_error
from unidec.interrupt import STARTED_BY
from unidec.pipeline.lock import one_at_a_time
from unidec.pipeline.parent_watch import watch
from unidec.surroundings import environment
from unidec.tracking.once import UNCLEAR
from unidec.tracking.run import RUN_TAGS, run_tags

# a helper that was killed must not be waited for longer than half a minute
RETRY_SECONDS = [2, 5, 10]
# classes of the errors of networks, servers and locked databases, by name: each client has its own
_PASSING = {
    "ConnectionError",
    "OperationalError",
    "ProtocolError",
    "Timeout",
    "TimeoutError",
    "TransportError",
}

# in Prefect's words for a run that a signal ended; flows.ending prints one line for it
_BY_SIGNAL = (
    "Execution was aborted by an interrupt signal",
    "Execution was aborted by a termination signal",
)

T = TypeVar("T")


def say(line: str) -> None:
    """Log a line to the terminal and to the run's page; the library's loggers write only to the
    page.
    """
    try:
        get_run_logger().info("%s", line)
    except MissingContextError:
        logging.getLogger("unidec.flows").info("%s", line)


class MayRecover(TrainingError):
    """A lock, a network, a server or a killed process stopped the work: it may succeed when it is
    retried.
    """


def known(error: BaseException) -> UnidecError | None:
    """The error as one message with its fix: an error of the project, the network or the file
    system; None: a bug.
    """
    if isinstance(error, UnidecError):
        return error
    names = {kind.__name__ for kind in type(error).__mro__}
    if names & _PASSING or getattr(error, "error_code", None) in UNCLEAR:
        got = " ".join(f"{type(error).__name__}: {error}".split())[:500]
        return MayRecover(
            "a server or a database does not answer",
            got=got,
            fix="run again: finished work is kept, and a training resumes from its last checkpoint",
        )
    return system_error(error) if isinstance(error, OSError) else None


@contextlib.contextmanager
def known_errors() -> Iterator[None]:
    """Inside the block, and in a function that it decorates, errors that are `known` are raised as
    such.
    """
    try:
        yield
    except Exception as error:
        found = known(error)
        if found is None or found is error:
            raise
        raise found from error


def worth_retrying(_task: Any, _task_run: Any, state: Any) -> bool:
    """Whether to retry a task: only what may recover. Other errors, bugs included, would recur."""
    return isinstance(state.result(raise_on_failure=False), MayRecover)


def run(name: str, work: Callable[..., T], *arguments: Any, retry: bool = False, **named: Any) -> T:
    """Call `work(*arguments, **named)`; in a flow run as a task of this name, whose page shows the
    result. `retry`: retry it after errors that may go away.
    """
    if FlowRunContext.get() is None:
        return work(*arguments, **named)

    @functools.wraps(work)
    @known_errors()
    def shown(*given: Any, **options: Any) -> T:
        result = work(*given, **options)
        publish.show_task(name, result)
        return result

    shown_task = task(
        shown,
        name=name,
        task_run_name=name,
        cache_policy=NO_CACHE,  # DVC and checkpoints decide what is already done
        persist_result=False,
        retries=len(RETRY_SECONDS) if retry else 0,
        retry_delay_seconds=RETRY_SECONDS,
        retry_condition_fn=worth_retrying,
    )
    return shown_task(*arguments, **named)


@contextlib.contextmanager
def at_work() -> Iterator[None]:
    """Wrap a flow's body: marks earlier runs that crashed, and tags MLflow runs with this flow run.

    A run that a worker or `dvc repro` started ends when that is gone, because then it can no longer
    be cancelled.
    """
    one_line_for_known_errors()
    context = FlowRunContext.get()
    if context is None or context.flow_run is None:
        yield
        return
    reconcile.reconcile_crashed_runs(context.flow_run)
    if "PREFECT__FLOW_RUN_ID" in os.environ or "DVC_STAGE" in os.environ:
        watch(STARTED_BY)
    ending.body.begin()
    try:
        with known_errors(), environment(RUN_TAGS, json.dumps(_tags())):
            yield
    except BaseException as error:
        ending.body.end(error)
        raise
    ending.body.end(None)


def finished(result: T) -> T:
    """Note the flow's result, and return it: the last statement in `at_work`."""
    ending.body.result = result
    return result


def _tags() -> dict[str, str]:
    """Tags that identify this flow run, for the MLflow runs and versions that it creates."""
    tags = run_tags() | {
        "prefect.flow_run_id": str(current_flow_run.id),
        "prefect.flow_run_name": current_flow_run.name,
    }
    url = without_credentials(str(current_flow_run.ui_url or ""))
    if url.startswith("http"):  # a temporary server has no page
        tags["prefect.flow_run_url"] = url
    if deployment.name:
        tags["prefect.deployment"] = f"{current_flow_run.flow_name}/{deployment.name}"
    return tags


def alone(work: Callable[[], dict[str, Any]]) -> Any:
    """Run `work` under the project's training lock; returns the flow's result or state.

    If the result has the key "skipped" or "refused" (the reason), the run's state is named after
    it. If another run holds the lock, a deployment's run ends as Cancelled.

    Raises:
        TrainingError: another run holds the lock, and no deployment started this one.
    """
    with contextlib.ExitStack() as stack:
        try:
            stack.enter_context(one_at_a_time())
        except TrainingError as error:
            if not deployment.id:
                raise
            return Cancelled(message=str(error))
        done = work()
    name = next((name for name in ("skipped", "refused") if name in done), None)
    if name is None or FlowRunContext.get() is None:
        return done
    return Completed(name=name.capitalize(), message=str(done[name])[:2000], data=done)


def _one_line(record: logging.LogRecord) -> bool:
    """Logging filter: no Prefect tracebacks for known errors and for runs that cancelled
    themselves, and nothing about signals, which the program itself reports.
    """
    message = record.getMessage()
    if any(words in message for words in _BY_SIGNAL):
        return False
    error = record.exc_info[1] if record.exc_info else None
    if isinstance(error, UnidecError | CancelledRun):
        record.msg = "stopped: %s"
        record.args = (str(error),)
        record.exc_info = None
        record.exc_text = None
    return True


def one_line_for_known_errors() -> None:
    """Install `_one_line` in Prefect's loggers; a second call changes nothing."""
    for name in ("prefect.flow_runs", "prefect.task_runs", "prefect.engine"):
        logging.getLogger(name).addFilter(_one_line)
