"""The temporary Prefect server of a flow that is started on the command line."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time

import psutil

# a flow as `python -m flows.train` runs it, with what it leaves to look at
PROGRAM = """
import json, os, sys
from concurrent.futures import ThreadPoolExecutor
from flows import command, server
server.start()
from prefect import flow, task
from prefect.settings import PREFECT_API_URL
from flows import lifecycle
from flows.ending import Ending
import psutil

@task
def step():
    return 1

@flow
def small():
    with lifecycle.at_work():
        step()
        children = psutil.Process().children()
        servers = [child.pid for child in children if "flows.server" in child.cmdline()]
        tags = json.loads(os.environ[lifecycle.RUN_TAGS])
        with ThreadPoolExecutor() as pool:  # as Prefect's pools of processes do
            addresses = [PREFECT_API_URL.value(), pool.submit(PREFECT_API_URL.value).result()]
        return {"servers": servers, "tags": tags, "addresses": addresses}

def run():
    with server.running():
        return small()

code = command.guarded(run, Ending(json.dumps))
print(json.dumps("prefect.server.api.server" in sys.modules))
sys.exit(code)
"""


def test_it_starts_once_outside_of_the_flows_process_and_ends_with_it(tmp_path, prefect_home):
    own = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("PREFECT_", "MLFLOW_"))
    }
    environment = own | {"PREFECT_HOME": str(prefect_home)}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stderr
    result, imported = done.stdout.splitlines()
    result = json.loads(result)
    assert json.loads(imported) is False, "the flow's process imported the server's code"
    assert len(result["servers"]) == 1
    address, in_thread = result["addresses"]
    assert address == in_thread, "a thread would start another server"
    end = time.monotonic() + 10  # it looks for the flow's process every second
    while psutil.pid_exists(result["servers"][0]):
        assert time.monotonic() < end
        time.sleep(0.1)
    # it has no pages
    assert "prefect.flow_run_id" in result["tags"] and "prefect.flow_run_url" not in result["tags"]
    assert "Finished in state Completed" in done.stderr and "Error" not in done.stderr


def test_a_setting_that_prefect_refuses_is_one_message(tmp_path):
    """Neither the flow's process nor its server prints a traceback."""
    environment = os.environ | {"PREFECT_HOME": str(tmp_path), "PREFECT_SERVER_API_PORT": "many"}
    done = subprocess.run(
        [sys.executable, "-m", "flows.train", "--steps", "ingest"],
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 2
    assert "error: PREFECT_SERVER_API_PORT: Prefect refuses" in done.stderr
    assert "fix:" in done.stderr and "Traceback" not in done.stderr
