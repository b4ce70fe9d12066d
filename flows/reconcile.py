"""Set flow runs of this machine that a crash left in the state Running to Crashed: `python -m
flows.reconcile`.

Every flow run does this at its start. On a Prefect server, an automation (flows/automations.yaml)
does it for all machines after three minutes without a heartbeat."""

from __future__ import annotations

import logging
import os
import socket
import sys

import psutil
from prefect.client.orchestration import get_client
from prefect.client.schemas.filters import FlowRunFilter
from prefect.client.schemas.objects import FlowRun, StateType
from prefect.states import Crashed

from flows.publish import harmless

log = logging.getLogger("unidec.flows")

_CLOCK_TOLERANCE = 5.0  # seconds by which the clocks of processes and of the server may differ
_MESSAGE = (
    "its process is gone (killed, or the machine stopped); the next run resumes from the last "
    "checkpoint"
)
_ACTIVE = FlowRunFilter.model_validate(
    {"state": {"type": {"any_": [StateType.RUNNING, StateType.CANCELLING]}}}
)


@harmless("could not check for crashed flow runs")
def reconcile_crashed_runs(own: FlowRun | None = None) -> None:
    """Set flow runs whose process on this machine is gone to Crashed; the next training ends their
    MLflow runs.

    Crashed runs no longer count for their deployment's concurrency limit. In the run `own`, this
    process is recorded in the format of Prefect's worker, "host:process id"."""
    with get_client(sync_client=True) as client:
        if own is not None:
            client.update_flow_run(
                own.id, infrastructure_pid=f"{socket.gethostname()}:{os.getpid()}"
            )
        for run in filter(process_is_gone, client.read_flow_runs(flow_run_filter=_ACTIVE)):
            client.set_flow_run_state(run.id, Crashed(message=_MESSAGE), force=True)
            log.warning("flow run %s is Crashed: %s", run.name, _MESSAGE)


def process_is_gone(run: FlowRun) -> bool:
    """Whether a run's process is gone; False if it is on another machine or was not recorded."""
    host, _, pid = (run.infrastructure_pid or "").rpartition(":")
    if host != socket.gethostname() or not pid.isdigit():
        return False
    began = run.start_time.timestamp() if run.start_time else 0.0
    try:  # a reused process id belongs to a younger process
        return psutil.Process(int(pid)).create_time() > began + _CLOCK_TOLERANCE
    except psutil.NoSuchProcess:
        return True


if __name__ == "__main__":
    logging.basicConfig(stream=sys.stdout, format="%(message)s")
    reconcile_crashed_runs()
