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
from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas import filters
from prefect.client.schemas.objects import FlowRun, StateType
from prefect.states import Cancelled, Crashed

from unidec.pipeline import runs

log = logging.getLogger("unidec.flows")

_SECONDS_APART = 5.0  # clocks of processes and of the server may differ a little
_AT_WORK = [StateType.RUNNING, StateType.CANCELLING]
_WORDS = "its process is gone (killed, or the machine stopped); the next run resumes from the last checkpoint"


def note_process(run: FlowRun) -> None:
    """Write into the flow run which process works on it, as Prefect's own worker does: "host:process id"."""
    try:
        with get_client(sync_client=True) as client:
            client.update_flow_run(run.id, infrastructure_pid=f"{socket.gethostname()}:{os.getpid()}")
    except Exception as error:  # Prefect's client has no common error
        log.warning("the flow run does not name its process: %s", error)


def reconcile_crashed_runs() -> list[str]:
    """Set flow runs Crashed whose process on this machine is gone, and end their MLflow runs; returns their names.

    A Crashed run no longer counts for its deployment's concurrency limit. A server that cannot be reached costs a
    warning.
    """
    crashed = []
    try:
        with get_client(sync_client=True) as client:
            for run in _found(client, filters.FlowRunFilter(state=_in(_AT_WORK))):
                if _process_is_gone(run):
                    client.set_flow_run_state(run.id, Crashed(message=_WORDS), force=True)
                    crashed.append(run.name)
                    log.warning("flow run %s is Crashed: %s", run.name, _WORDS)
    except Exception as error:
        log.warning("crashed flow runs could not be looked for: %s", error)
    if crashed:
        runs.reconcile_crashed_runs()
    return crashed


def cancel_late_runs(run: FlowRun) -> None:
    """Cancel the scheduled runs that are due and wait, for `run` does their work: after an outage there may be many.

    Alike are runs of the same deployment with the same parameters. What a person asked for is never cancelled.
    """
    alike = filters.FlowRunFilter(
        deployment_id=filters.FlowRunFilterDeploymentId(any_=[run.deployment_id]),
        state=_in([StateType.SCHEDULED]),
        next_scheduled_start_time=filters.FlowRunFilterNextScheduledStartTime(before_=datetime.now(UTC)),
    )
    try:
        with get_client(sync_client=True) as client:
            for other in _found(client, alike):
                if other.auto_scheduled and other.id != run.id and other.parameters == run.parameters:
                    words = f"run {run.name} does its work too: several were due at once"
                    client.set_flow_run_state(other.id, Cancelled(message=words))
                    log.info("late run %s is cancelled: %s", other.name, words)
    except Exception as error:  # runs that wait are no reason not to work
        log.warning("late runs could not be looked for: %s", error)


def _in(states: list[StateType]) -> filters.FlowRunFilterState:
    return filters.FlowRunFilterState(type=filters.FlowRunFilterStateType(any_=states))


def _found(client: SyncPrefectClient, wanted: filters.FlowRunFilter) -> list[FlowRun]:
    return client.read_flow_runs(flow_run_filter=wanted, limit=200)  # Prefect's limit for one answer


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
