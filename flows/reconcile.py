"""Flow runs that an outage left in a wrong state: `python -m flows.reconcile` sets crashed ones in order.

Prefect's automation (flows/automations.yaml) does this for any machine after three silent minutes, where a server runs;
every flow run that begins does it at once for its own machine, also on a temporary server.
"""

from __future__ import annotations

import logging
import os
import socket
import sys
from datetime import UTC, datetime

import flows  # noqa: F401  sets Prefect's home and quiets it, before it is imported

# isort: split
import psutil
from prefect.client.orchestration import get_client
from prefect.client.schemas import filters
from prefect.client.schemas.objects import FlowRun, StateType
from prefect.states import Cancelled, Crashed

from flows.artifacts import harmless
from unidec.pipeline import runs

log = logging.getLogger("unidec.flows")

_SECONDS_APART = 5.0  # clocks of processes and of the server may differ a little
_WORDS = "its process is gone (killed, or the machine stopped); the next run resumes from the last checkpoint"


@harmless("the flow run does not name its process")
def note_process(run: FlowRun) -> None:
    """Write into the flow run which process works on it, as Prefect's own worker does: "host:process id"."""
    with get_client(sync_client=True) as client:
        client.update_flow_run(run.id, infrastructure_pid=f"{socket.gethostname()}:{os.getpid()}")


def reconcile_crashed_runs() -> list[str]:
    """Set flow runs Crashed whose process on this machine is gone, and end their MLflow runs; returns their names.

    A Crashed run no longer counts for its deployment's concurrency limit. A server that cannot be reached costs a
    warning.
    """
    crashed = []
    with harmless("crashed flow runs could not be looked for"), get_client(sync_client=True) as client:
        at_work = filters.FlowRunFilter(state=_in(StateType.RUNNING, StateType.CANCELLING))
        for run in client.read_flow_runs(flow_run_filter=at_work):
            if _process_is_gone(run):
                client.set_flow_run_state(run.id, Crashed(message=_WORDS), force=True)
                crashed.append(run.name)
                log.warning("flow run %s is Crashed: %s", run.name, _WORDS)
    if crashed:
        runs.reconcile_crashed_runs()
    return crashed


@harmless("late runs could not be looked for")  # runs that wait are no reason not to work
def cancel_late_runs(run: FlowRun) -> None:
    """Cancel the scheduled runs that are due and wait, for `run` does their work: after an outage there may be many.

    Alike are runs of the same deployment with the same parameters. What a person asked for is never cancelled.
    """
    alike = filters.FlowRunFilter(
        deployment_id=filters.FlowRunFilterDeploymentId(any_=[run.deployment_id]),
        state=_in(StateType.SCHEDULED),
        next_scheduled_start_time=filters.FlowRunFilterNextScheduledStartTime(before_=datetime.now(UTC)),
    )
    words = f"run {run.name} does its work too: several were due at once"
    with get_client(sync_client=True) as client:
        for other in client.read_flow_runs(flow_run_filter=alike):
            if other.auto_scheduled and other.id != run.id and other.parameters == run.parameters:
                client.set_flow_run_state(other.id, Cancelled(message=words))
                log.info("late run %s is cancelled: %s", other.name, words)


def _in(*states: StateType) -> filters.FlowRunFilterState:
    return filters.FlowRunFilterState(type=filters.FlowRunFilterStateType(any_=list(states)))


def _process_is_gone(run: FlowRun) -> bool:
    """False also where it cannot be known: another machine, or no process noted."""
    host, _, pid = (run.infrastructure_pid or "").rpartition(":")
    if host != socket.gethostname() or not pid.isdigit():
        return False
    try:
        process = psutil.Process(int(pid))
        began = run.start_time.timestamp() if run.start_time else 0.0
        was_reused = process.create_time() > began + _SECONDS_APART
        return was_reused or process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


if __name__ == "__main__":
    for name in reconcile_crashed_runs():
        print(f"{name}: Crashed, {_WORDS}")
    sys.exit(0)
