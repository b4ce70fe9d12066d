"""After an outage of server or worker: of many late scheduled runs one does the work.

A run brings everything up to date, however many schedules passed: ten that are due at once would be nine too many.
"""

from __future__ import annotations

import logging
from datetime import UTC, datetime
from typing import Any

from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas import filters
from prefect.client.schemas.objects import FlowRun, StateType
from prefect.context import FlowRunContext
from prefect.states import Cancelled

log = logging.getLogger("unidec.flows")

_MOST = 200  # Prefect's limit for one answer


def collapse() -> str | None:
    """Cancels the scheduled runs that are due and wait, for this run does their work; only those like it count.

    Alike are runs of the same deployment with the same parameters. What a person asked for is never cancelled.

    Returns:
        why this run itself has nothing to do: another one has begun after this was due, and completed; else None.
    """
    context = FlowRunContext.get()
    run = context.flow_run if context is not None else None
    if run is None or run.deployment_id is None:
        return None
    try:
        with get_client(sync_client=True) as client:
            if run.auto_scheduled and (done := _done_since(client, run)) is not None:
                return f"run {done.name} has done its work: it began after this one was due"
            for other in _waiting(client, run):
                words = f"run {run.name} does its work too: several were due at once"
                client.set_flow_run_state(other.id, Cancelled(message=words))
                log.info("late run %s is cancelled: %s", other.name, words)
    except Exception as error:  # runs that wait are no reason not to work
        log.warning("late runs could not be looked for: %s", error)
    return None


def _done_since(client: SyncPrefectClient, run: FlowRun) -> FlowRun | None:
    """A run like this that began after this one was due, and completed."""
    found = _alike(client, run, StateType.COMPLETED, start_time=filters.FlowRunFilterStartTime(after_=_due(run)))
    return next(iter(found), None)


def _waiting(client: SyncPrefectClient, run: FlowRun) -> list[FlowRun]:
    """Scheduled runs like this that should have begun by now."""
    due = filters.FlowRunFilterNextScheduledStartTime(before_=datetime.now(UTC))
    found = _alike(client, run, StateType.SCHEDULED, next_scheduled_start_time=due)
    return [other for other in found if other.auto_scheduled]


def _alike(client: SyncPrefectClient, run: FlowRun, state: StateType, **when: Any) -> list[FlowRun]:
    of_deployment = filters.FlowRunFilterDeploymentId(any_=[run.deployment_id])
    in_state = filters.FlowRunFilterState(type=filters.FlowRunFilterStateType(any_=[state]))
    wanted = filters.FlowRunFilter(deployment_id=of_deployment, state=in_state, **when)
    found = client.read_flow_runs(flow_run_filter=wanted, limit=_MOST)
    return [other for other in found if other.id != run.id and other.parameters == run.parameters]


def _due(run: FlowRun) -> Any:
    return run.expected_start_time or run.created
