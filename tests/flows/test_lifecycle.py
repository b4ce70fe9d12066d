"""How runs begin and end, through Prefect: their tags in MLflow, their names, and who is turned
away.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys

import psutil
import pytest

from unidec.errors import TrainingError
from unidec.interrupt import STARTED_BY
from unidec.tracking.run import RUN_TAGS


@pytest.fixture(scope="module")
def lifecycle():
    from flows import lifecycle

    return lifecycle


@pytest.fixture
def deploy(prefect_server):
    """`deploy(flow)`: runs it as a worker does, for a deployment; gives the run's end."""
    from prefect.client.orchestration import get_client
    from prefect.flow_engine import run_flow

    with get_client(sync_client=True) as client:
        made = set()

        def deploy(body):
            deployment = client.create_deployment(client.create_flow(body), "some")
            made.add(deployment)
            run = client.create_flow_run_from_deployment(deployment)
            run_flow(body, flow_run=client.read_flow_run(run.id), return_type="state")
            return client.read_flow_run(run.id)

        yield deploy
        for deployment in made:
            client.delete_deployment(deployment)


@pytest.mark.parametrize("stage", ["train", None])
def test_a_stage_ends_with_dvc(lifecycle, deploy, monkeypatch, stage):
    """A killed `dvc repro` leaves no training behind."""
    from prefect import flow

    watched = []
    monkeypatch.delenv("DVC_STAGE", raising=False)
    monkeypatch.delenv("PREFECT__FLOW_RUN_ID", raising=False)
    if stage is not None:
        monkeypatch.setenv("DVC_STAGE", stage)
    monkeypatch.setattr(lifecycle, "watch", watched.append)

    @flow(name="unidec-stage")
    def body() -> None:
        with lifecycle.at_work():
            pass

    assert deploy(body).state.is_completed()
    assert watched == ([STARTED_BY] if stage is not None else [])


def test_dvc_may_end_while_the_stage_still_imports() -> None:
    """A stage watches the process that started it, not the one that adopted it."""
    stage = """
import os, time
from unidec.interrupt import STARTED_BY
print(os.getpid(), flush=True)
while os.getppid() == STARTED_BY:
    time.sleep(0.01)
from unidec.pipeline.parent_watch import watch
watch(STARTED_BY)
time.sleep(60)
"""
    starts_it = "import subprocess, sys; subprocess.run([sys.executable, '-c', sys.argv[1]])"
    command = [sys.executable, "-c", starts_it, stage]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as dvc:
        assert dvc.stdout is not None
        process = psutil.Process(int(dvc.stdout.readline()))
        dvc.kill()
    _, alive = psutil.wait_procs([process], timeout=30)
    for one in alive:
        one.kill()
    assert not alive


def test_what_mlflow_gets_to_know(lifecycle, deploy, monkeypatch):
    from prefect import flow

    # of whoever is around us
    monkeypatch.setenv(RUN_TAGS, json.dumps({"mlflow.parentRunId": "abc"}))
    seen = {}

    @flow(name="unidec-tagged")
    def body() -> None:
        with lifecycle.at_work():
            seen.update(json.loads(os.environ[RUN_TAGS]))

    run = deploy(body)
    assert run.state.is_completed(), run.state.message
    assert seen["mlflow.parentRunId"] == "abc"
    assert seen["prefect.flow_run_id"] == str(run.id)
    assert seen["prefect.flow_run_name"] == run.name
    assert seen["prefect.deployment"] == "unidec-tagged/some"
    expected = f"{socket.gethostname()}:{os.getpid()}"
    assert run.infrastructure_pid == expected
    assert json.loads(os.environ[RUN_TAGS]) == {"mlflow.parentRunId": "abc"}
    monkeypatch.delenv(RUN_TAGS)
    assert deploy(body).state.is_completed() and RUN_TAGS not in os.environ


def test_a_deployment_that_has_no_turn_is_cancelled_and_a_caller_is_told(
    lifecycle, deploy, monkeypatch
):
    from prefect import flow

    @contextlib.contextmanager
    def busy():
        raise TrainingError("another training is under way in this folder", where="runs")
        yield

    monkeypatch.setattr(lifecycle, "one_at_a_time", busy)

    @flow(name="unidec-busy")
    def body() -> object:
        return lifecycle.alone(dict)

    state = deploy(body).state
    assert state.is_cancelled() and "another training is under way" in state.message
    with pytest.raises(TrainingError, match="another training is under way"):
        body()
    with pytest.raises(TrainingError):
        body.fn()


def test_a_run_without_prefect_is_left_alone(lifecycle, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with lifecycle.at_work():
        assert RUN_TAGS not in os.environ
    assert lifecycle.alone(lambda: {"skipped": "nothing new"}) == {"skipped": "nothing new"}


def test_a_run_that_was_turned_away_is_one_line_in_the_workers_log(lifecycle):
    import logging

    from prefect.exceptions import CancelledRun
    from prefect.logging.loggers import get_logger

    lifecycle.one_line_for_known_errors()
    try:
        raise CancelledRun("another training is under way")
    except CancelledRun as error:
        record = logging.LogRecord(
            "x", logging.ERROR, __file__, 1, "unexpected", (), (type(error), error, None)
        )
    assert get_logger("engine").filter(record)
    assert (
        record.getMessage() == "stopped: another training is under way" and record.exc_info is None
    )
