"""Runs whose process was killed: on a real server, with processes that are really gone."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from types import SimpleNamespace

import pytest


@pytest.fixture
def client(prefect_server):
    from prefect.client.orchestration import get_client

    with get_client(sync_client=True) as client:
        yield client


@pytest.fixture
def reconcile():
    from flows import reconcile

    return SimpleNamespace(crashed=reconcile.reconcile_crashed_runs, module=reconcile)


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
        "killed": f"{host}:{dead_pid()}",
        "ended": f"{host}:{dead_pid()}",
        "alive": f"{host}:{os.getpid()}",
        "elsewhere": f"another:{dead_pid()}",
        "unknown": None,
        "reused": f"{host}:{parent.pid}",
    }
    runs = {}
    for name, pid in pids.items():
        runs[name] = client.create_flow_run(nothing)
        client.set_flow_run_state(
            runs[name].id, Completed() if name == "ended" else Running(), force=True
        )
        if pid:
            client.update_flow_run(runs[name].id, infrastructure_pid=pid)
    try:
        # as if the other process had started much later
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(reconcile.module, "_CLOCK_TOLERANCE", -3600.0)
            is_gone = reconcile.module.process_is_gone
            assert is_gone(client.read_flow_run(runs["reused"].id))
        client.set_flow_run_state(runs["reused"].id, Completed(), force=True)
        reconcile.crashed()
        crashed = client.read_flow_run(runs["killed"].id).state
        assert crashed.is_crashed() and "process is gone" in crashed.message
        assert client.read_flow_run(runs["ended"].id).state.is_completed()
        for name in ("alive", "elsewhere", "unknown"):
            assert client.read_flow_run(runs[name].id).state.is_running()
        reconcile.crashed()
    finally:
        parent.communicate()
        for name in ("alive", "elsewhere", "unknown"):
            client.set_flow_run_state(runs[name].id, Completed(), force=True)


def test_a_server_that_is_away_costs_a_warning(reconcile, monkeypatch, caplog):
    def away(**_options: object) -> None:
        raise ConnectionError("no server")

    monkeypatch.setattr(reconcile.module, "get_client", away)
    reconcile.crashed()
    assert "no server" in caplog.text
