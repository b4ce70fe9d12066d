"""Runs whose process was killed, and runs that are late: on a real server, with processes that are really gone."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import SimpleNamespace

import pytest


@pytest.fixture
def client(prefect_server):
    from prefect.client.orchestration import get_client

    with get_client(sync_client=True) as client:
        yield client


@pytest.fixture
def reconcile(monkeypatch):
    """The module; `closed`: how often it looked for MLflow runs to end."""
    from flows import reconcile

    closed = []
    monkeypatch.setattr(reconcile.runs, "reconcile_crashed_runs", lambda: closed.append(1))
    return SimpleNamespace(crashed=reconcile.reconcile_crashed_runs, module=reconcile, closed=closed)


def dead_pid() -> int:
    process = subprocess.Popen([sys.executable, "-c", "pass"])
    process.wait()
    return process.pid


def test_a_run_of_a_killed_process_is_set_crashed(reconcile, client):
    from prefect import flow
    from prefect.states import Completed, Running

    @flow(name="unidec-test")
    def nothing() -> None: ...

    host = socket.gethostname()
    parent = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    pids = {
        "killed": f"{host}:{dead_pid()}", "ended": f"{host}:{dead_pid()}", "alive": f"{host}:{os.getpid()}",
        "elsewhere": f"another:{dead_pid()}", "unknown": None, "reused": f"{host}:{parent.pid}",
    }  # fmt: skip
    runs = {}
    for name, pid in pids.items():
        runs[name] = client.create_flow_run(nothing)
        client.set_flow_run_state(runs[name].id, Completed() if name == "ended" else Running(), force=True)
        if pid:
            client.update_flow_run(runs[name].id, infrastructure_pid=pid)
    try:
        with pytest.MonkeyPatch.context() as patch:  # as if the other process had started much later
            patch.setattr(reconcile.module, "_SECONDS_APART", -3600.0)
            is_gone = reconcile.module._process_is_gone
            assert is_gone(client.read_flow_run(runs["reused"].id))
        client.set_flow_run_state(runs["reused"].id, Completed(), force=True)
        assert reconcile.crashed() == [runs["killed"].name] and reconcile.closed == [1]
        crashed = client.read_flow_run(runs["killed"].id).state
        assert crashed.is_crashed() and "process is gone" in crashed.message
        assert client.read_flow_run(runs["ended"].id).state.is_completed()
        for name in ("alive", "elsewhere", "unknown"):
            assert client.read_flow_run(runs[name].id).state.is_running()
        assert reconcile.crashed() == [] and reconcile.closed == [1]
    finally:
        parent.communicate()
        for name in ("alive", "elsewhere", "unknown"):
            client.set_flow_run_state(runs[name].id, Completed(), force=True)


def test_a_server_that_is_away_costs_a_warning(reconcile, monkeypatch, caplog):
    def away(**_options: object) -> None:
        raise ConnectionError("no server")

    monkeypatch.setattr(reconcile.module, "get_client", away)
    assert reconcile.crashed() == [] and "no server" in caplog.text


def test_lines_that_no_worker_reads_end_nothing(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    program = (
        "import sys, time; {}\n"
        "while sys.stdin.readline():\n"  # notices when its reader is gone
        "    print('1 of 3 batches', flush=True); print('2', file=sys.stderr, flush=True)\n"
        "    open('heard', 'w').close()"
    )
    unheard = "from flows.lifecycle import _WorkerStream as S; sys.stdout, sys.stderr = S(sys.stdout), S(sys.stderr)"
    assert [speak(program.format(first)) for first in ("", unheard)] == [False, True]


def speak(program: str) -> bool:
    """Whether a program keeps running when its output is not read."""
    Path("heard").unlink(missing_ok=True)
    pipe = subprocess.PIPE
    process = subprocess.Popen([sys.executable, "-c", program], stdin=pipe, stdout=pipe, stderr=pipe, text=True)
    process.stdout.close()
    process.stderr.close()
    process.stdin.write("speak\n")
    process.stdin.close()
    process.wait(120)
    return Path("heard").exists()


# -- late runs ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def deployed(client):
    """`deployed(minutes late, by schedule, parameters)`: a run that waits; `deployed.work(run)`: it runs."""
    from prefect import flow
    from prefect.states import Scheduled

    from flows import lifecycle

    @flow(name="unidec-late")
    def body(force: bool = False) -> None:
        with lifecycle.at_work():
            pass

    deployment = client.create_deployment(client.create_flow(body), "late")

    def ask(minutes: float, by_schedule: bool = True, **parameters: bool):
        due = datetime.now(UTC) - timedelta(minutes=minutes)
        run = client.create_flow_run_from_deployment(
            deployment, parameters=parameters, state=Scheduled(scheduled_time=due)
        )
        if by_schedule:  # only the server's scheduler marks its runs so
            mark_scheduled(run.id)
        return client.read_flow_run(run.id)

    def work(run):
        from prefect.flow_engine import run_flow

        run_flow(body, flow_run=client.read_flow_run(run.id), return_type="state")

    ask.work = work
    ask.state = lambda run: client.read_flow_run(run.id).state
    yield ask
    client.delete_deployment(deployment)


def mark_scheduled(run_id) -> None:
    """In the server's database: `auto_scheduled`."""
    import sqlite3

    from prefect.settings import get_current_settings

    url = get_current_settings().server.database.connection_url.get_secret_value()
    with sqlite3.connect(url.partition("///")[2]) as database:
        database.execute("update flow_run set auto_scheduled = 1 where id = ?", (str(run_id),))
    database.close()


def test_of_ten_late_runs_one_works(deployed):
    late = [deployed(60 * (10 - number)) for number in range(10)]
    future = deployed(-60)
    by_hand, forced = deployed(5, by_schedule=False), deployed(5, force=True)
    deployed.work(late[0])
    assert deployed.state(late[0]).is_completed()
    for run in late[1:]:
        state = deployed.state(run)
        assert state.is_cancelled() and f"run {late[0].name} does its work too" in state.message
    for run in (future, by_hand, forced):  # not due, asked for by a person, asked for something else
        assert deployed.state(run).is_scheduled()
