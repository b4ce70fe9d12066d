"""A team's servers on a real PostgreSQL, started by the commands of mlflow/compose.yaml."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from pathlib import Path

import pytest
from helpers import compose, postgres_server
from helpers.mlflow_server import wait_for
from helpers.ports import free_port
from helpers.small_bundle import write_small_bundle
from helpers.working_folder import at

from unidec.tracking.fetch import fetch_bundle
from unidec.tracking.registry import checked_sha256, register
from unidec.tracking.run import Tracker
from unidec.tracking.store import open_client

pytest.importorskip("psycopg2", reason="the extra `postgres` is not installed")


@pytest.fixture(scope="module")
def postgres():
    if postgres_server.binaries() is None:
        pytest.skip("PostgreSQL is not installed (Debian: apt-get install postgresql)")
    server = postgres_server.Postgres()
    try:
        server.start()
        yield server
    finally:
        server.stop()


def start(postgres, name: str, folder: Path, port: int) -> subprocess.Popen:
    """A service of compose.yaml as a process: its command and environment, with this machine's
    ports and folders.
    """
    file = compose.compose()
    places = {
        "@postgres:5432": f"@127.0.0.1:{postgres.port}",
        "/run/secrets": str(postgres.secrets),
        "0.0.0.0": "127.0.0.1",
        "s3://mlflow": str(folder / "artifacts"),
        "/srv/prefect": str(folder / "prefect"),
        "--port 4200": f"--port {port}",
    }
    service = compose.outside(file["services"][name], places)
    own = {
        key: value
        for key, value in os.environ.items()
        if not key.startswith(("MLFLOW_", "PREFECT_", "PG"))
    }
    environment = (
        own
        | service["environment"]
        | {"PATH": f"{Path(sys.executable).parent}{os.pathsep}{own['PATH']}"}
    )
    if name == "mlflow":
        environment |= {"MLFLOW_PORT": str(port), "MLFLOW_WORKERS": "1"}
    log = folder / f"{name}.log"
    with log.open("wb") as file:
        process = subprocess.Popen(
            service["command"],
            cwd=folder,
            env=environment,
            stdout=file,
            stderr=file,
            start_new_session=True,
        )
    health = {"mlflow": "health", "prefect": "api/health"}[name]
    assert f"/{health}'" in service["healthcheck"]["test"][-1]
    try:
        wait_for(f"http://127.0.0.1:{port}/{health}", process, log, 200)
    except AssertionError:
        stop(process)
        raise
    return process


def stop(process: subprocess.Popen) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait(20)


def tracked(folder: Path) -> Tracker:
    """A finished run with figures and a file."""
    tracker = Tracker("tests")
    tracker.start(
        folder / "run",
        {"seed": 0},
        {"git.dirty": "false"},
        {"name": "tiny", "digest": "d", "path": "p"},
    )
    for step in range(1500):
        tracker.log(step, {"loss": step / 7})
    tracker.log_final({"test/P@1": 41.0})
    (folder / "report.html").write_text("<p>")
    tracker.log_files([folder / "report.html"])
    tracker.finish()
    return tracker


@pytest.fixture(scope="module")
def mlflow(postgres, tmp_path_factory):
    """Address of MLflow's server."""
    port = free_port()
    process = start(postgres, "mlflow", tmp_path_factory.mktemp("mlflow"), port)
    yield f"http://127.0.0.1:{port}"
    stop(process)


@pytest.mark.slow
def test_runs_models_and_aliases_behind_the_server(mlflow, tmp_path, monkeypatch):
    # loading a model puts its copied code in front
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setenv("MLFLOW_TRACKING_URI", mlflow)
    tracker = tracked(tmp_path)
    bundle = write_small_bundle(tmp_path)
    version = register(bundle, tracker.run_id, "unidec")
    assert register(bundle, tracker.run_id, "unidec") == version  # the same bundle again
    client = open_client(mlflow)
    run = client.get_run(tracker.run_id)
    assert (
        run.info.status == "FINISHED"
        and run.data.metrics["test/P_at_1"] == 41.0
        and run.data.params["seed"] == "0"
    )
    assert run.info.artifact_uri.startswith("mlflow-artifacts:/")
    points = client.get_metric_history(tracker.run_id, "loss")
    assert sorted((p.step, p.value) for p in points) == [(s, s / 7) for s in range(1500)]
    assert client.get_registered_model("unidec").aliases == {"challenger": str(version)}
    paths = [entry.path for entry in client.list_artifacts(tracker.run_id)]
    assert paths == ["report.html"]
    fetched = tmp_path / at(tmp_path, fetch_bundle, "models:/unidec@challenger")
    assert checked_sha256(fetched) == checked_sha256(bundle)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("mlflow:5000", 200),
        ("127.0.0.1:5000", 200),
        ("localhost:7", 200),
        ("evil.example.com", 403),
    ],
)
def test_the_server_answers_to_its_names_only(mlflow, host, status):
    request = urllib.request.Request(
        f"{mlflow}/api/2.0/mlflow/experiments/get?experiment_id=0", headers={"Host": host}
    )
    try:
        with urllib.request.urlopen(request, timeout=20) as answer:
            got = answer.status
    except urllib.error.HTTPError as error:
        got = error.code
    assert got == status


@pytest.mark.slow
def test_prefects_server_on_postgres(postgres, tmp_path):
    port = free_port()
    process = start(postgres, "prefect", tmp_path, port)
    api = f"http://127.0.0.1:{port}/api"
    environment = {
        name: value for name, value in os.environ.items() if not name.startswith("PREFECT_")
    }
    environment |= {
        "PREFECT_API_URL": api,
        "PREFECT_HOME": str(tmp_path / "home"),
        "DO_NOT_TRACK": "true",
    }
    code = (
        "from prefect import flow\n\n@flow(name='tiny')\ndef tiny(n: int = 2):\n    return n + "
        "1\n\ntiny(3)\n"
    )
    (tmp_path / "tiny.py").write_text(code)
    try:
        done = subprocess.run(
            [sys.executable, "tiny.py"],
            cwd=tmp_path,
            env=environment,
            capture_output=True,
            text=True,
            timeout=120,
        )
        assert done.returncode == 0, done.stderr
        body = json.dumps({"limit": 5}).encode()
        request = urllib.request.Request(
            f"{api}/flow_runs/filter", data=body, headers={"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=20) as answer:
            (run,) = json.load(answer)
        assert run["state_type"] == "COMPLETED"
        assert run["parameters"] == {"n": 3}
    finally:
        stop(process)
