"""Flow runs that a crash left Running: `python -m flows.reconcile` sets those of this machine to Crashed.

Every flow run does the same at its start. With a Prefect server, an automation (flows/automations.yaml) does it for any
machine after three minutes without a heartbeat.
"""

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

_SECONDS_APART = 5.0  # clocks of processes and of the server may differ a little
_WORDS = "its process is gone (killed, or the machine stopped); the next run resumes from the last checkpoint"
_AT_WORK = FlowRunFilter.model_validate({"state": {"type": {"any_": [StateType.RUNNING, StateType.CANCELLING]}}})


@harmless("crashed flow runs could not be looked for")
def reconcile_crashed_runs(own: FlowRun | None = None) -> None:
    """Set flow runs whose process on this machine is gone to Crashed; the next training ends their MLflow runs.

    A Crashed run no longer counts for its deployment's concurrency limit. The process of the run `own` is recorded in
    it as Prefect's worker does: "host:process id".
    """
    with get_client(sync_client=True) as client:
        if own is not None:
            client.update_flow_run(own.id, infrastructure_pid=f"{socket.gethostname()}:{os.getpid()}")
        for run in filter(_process_is_gone, client.read_flow_runs(flow_run_filter=_AT_WORK)):
            client.set_flow_run_state(run.id, Crashed(message=_WORDS), force=True)
            log.warning("flow run %s is Crashed: %s", run.name, _WORDS)


def _process_is_gone(run: FlowRun) -> bool:
    """Whether a run's process is gone; False if unknown: another machine, or no recorded process."""
    host, _, pid = (run.infrastructure_pid or "").rpartition(":")
    if host != socket.gethostname() or not pid.isdigit():
        return False
    began = run.start_time.timestamp() if run.start_time else 0.0
    try:  # a reused process id belongs to a younger process
        return psutil.Process(int(pid)).create_time() > began + _SECONDS_APART
    except psutil.NoSuchProcess:
        return True


if __name__ == "__main__":
    logging.basicConfig(stream=sys.stdout, format="%(message)s")
    reconcile_crashed_runs()
