"""A real Prefect server and worker on this machine: a run asked for by hand and one by schedule, both to their end.

With wrong versions beside Prefect (see the pins in pyproject.toml) schedules silently never fire; only this shows it.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

import pytest
import yaml

REPOSITORY = Path(__file__).resolve().parents[2]
JOB = {"steps": "ingest"}  # the real flow, its first step only, on three labels
INTERVAL = 10  # seconds between scheduled runs

TABLES = {
    "queries.csv": "id,text,split\n" + "".join(f"q{i},text {i},{'train' if i < 18 else 'test'}\n" for i in range(24)),
    "labels.csv": "id,text\na,first label\nb,second label\nc,third label\n",
    "pairs.csv": "query_id,label_id\n" + "".join(f"q{i},{'abc'[i % 3]}\n" for i in range(24)),
}


class Prefect:
    """A server with a home of its own, whose every process is gone when the block ends."""

    def __init__(self, project: Path, home: Path) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        self.api = f"http://127.0.0.1:{self.port}/api"
        self.project, self.home = project, home
        own = {name: value for name, value in os.environ.items() if not name.startswith(("PREFECT_", "MLFLOW_"))}
        self.environment = own | {
            "PREFECT_HOME": str(home),
            "PREFECT_API_URL": self.api,
            "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
            "PREFECT_WORKER_QUERY_SECONDS": "1",
            "PREFECT_SERVER_SERVICES_SCHEDULER_LOOP_SECONDS": "5",
            "DO_NOT_TRACK": "true",
            "OMP_NUM_THREADS": "1",
            "OMP_WAIT_POLICY": "PASSIVE",
        }
        self.started: list[subprocess.Popen[bytes]] = []

    def command(self, *words: str) -> str:
        done = subprocess.run(
            [sys.executable, "-m", "prefect", *words],
            cwd=self.project,
            env=self.environment,
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def start(self, log: str, *words: str) -> None:
        with (self.home / log).open("wb") as file:
            process = subprocess.Popen(
                [sys.executable, "-m", "prefect", *words],
                cwd=self.project,
                env=self.environment,
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self.started.append(process)

    def ask(self, path: str, body: dict | None = None):
        request = urllib.request.Request(
            f"{self.api}/{path}",
            data=None if body is None else json.dumps(body).encode(),
            headers={"Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=20) as answer:
            return json.load(answer)

    def log(self, name: str) -> str:
        return (self.home / name).read_text(errors="replace")

    def wait_until(self, true, what: str, seconds: float):
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            with contextlib.suppress(urllib.error.URLError, ConnectionError, TimeoutError):
                found = true()
                if found:
                    return found
            assert all(process.poll() is None for process in self.started), f"ended early: {self.all_logs()}"
            time.sleep(0.5)
        raise AssertionError(f"no {what} after {seconds} s\n{self.all_logs()}")

    def all_logs(self) -> str:
        return "\n".join(
            f"--- {path.name}\n{path.read_text(errors='replace')[-6000:]}" for path in self.home.glob("*.log")
        )

    def stop(self) -> None:
        for process in reversed(self.started):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait(10)
        for pid in self.left():  # flow runs that the worker started in groups of their own
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def left(self) -> list[int]:
        """Processes that carry this server's home in their environment (Linux)."""
        mark, found = f"PREFECT_HOME={self.home}".encode(), []
        for entry in Path("/proc").glob("[0-9]*/environ"):
            with contextlib.suppress(OSError):
                if mark in entry.read_bytes().split(b"\0"):
                    found.append(int(entry.parent.name))
        return found


@pytest.fixture
def project(tmp_path) -> Path:
    """A copy of what a deployment needs: the flow, prefect.yaml with a quicker schedule, a tiny data set."""
    shutil.copytree(REPOSITORY / "flows", tmp_path / "project" / "flows", ignore=shutil.ignore_patterns("__pycache__"))
    described = yaml.safe_load((REPOSITORY / "prefect.yaml").read_text(encoding="utf-8"))
    (deployment,) = [one for one in described["deployments"] if one["name"] == "train"]
    assert deployment["schedules"] == [{"cron": "0 3 * * *", "timezone": "UTC", "active": False}]
    deployment |= {"parameters": JOB, "schedules": [{"interval": INTERVAL, "active": False}]}
    (tmp_path / "project" / "prefect.yaml").write_text(yaml.safe_dump(described))
    (tmp_path / "project" / "raw").mkdir()
    for name, text in TABLES.items():
        (tmp_path / "project" / "raw" / name).write_text(text)
    (tmp_path / "project" / "params.yaml").write_text("data: {path: raw, format: tables}\n")
    return tmp_path / "project"


@pytest.fixture
def prefect(project, tmp_path):
    home = tmp_path / "home"
    home.mkdir()
    server = Prefect(project, home)
    try:
        yield server
    finally:
        server.stop()


def completed(prefect: Prefect) -> list[dict]:
    """The runs that ended well; one that failed ends the test."""
    runs = prefect.ask("flow_runs/filter", {"sort": "START_TIME_DESC"})
    failed = [run for run in runs if run["state_type"] in ("FAILED", "CRASHED")]
    assert not failed, f"{failed[0]['state']}\n{prefect.all_logs()}"
    return [run for run in runs if run["state_type"] == "COMPLETED"]


@pytest.mark.timeout(500)
def test_a_manual_and_a_scheduled_run_complete(prefect, project):
    prefect.start("server.log", "server", "start", "--host", "127.0.0.1", "--port", str(prefect.port))
    prefect.wait_until(lambda: prefect.ask("health"), "healthy server", 120)
    prefect.command("work-pool", "create", "local", "--type", "process")
    prefect.command("--no-prompt", "deploy", "--all")
    prefect.start("worker.log", "worker", "start", "--pool", "local")
    prefect.command("deployment", "run", "unidec/train")

    (run,) = prefect.wait_until(lambda: completed(prefect), "completed run", 120)
    assert not run["auto_scheduled"] and run["parameters"]["steps"] == JOB["steps"]
    assert (project / "data/dataset/manifest.json").is_file()

    # only now: while a run is at work the deployment cancels any other
    (schedule,) = prefect.ask("deployments/name/unidec/train")["schedules"]
    prefect.command("deployment", "schedule", "resume", "unidec/train", schedule["id"])
    runs = prefect.wait_until(
        lambda: [run for run in completed(prefect) if run["auto_scheduled"]], "completed run by schedule", 150
    )
    assert runs[0]["parameters"]["steps"] == JOB["steps"]
    for log in ("server.log", "worker.log"):
        assert "Traceback" not in prefect.log(log), prefect.log(log)[-8000:]
    prefect.stop()
    assert prefect.left() == []
