"""A real Prefect server and worker on this machine, started by the commands of docs/retraining.md,
for tests.

Every process that is started here, and every one that these start, is gone when the block ends.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from helpers.ports import free_port

ENDED = ("COMPLETED", "FAILED", "CRASHED", "CANCELLED")

# a day's work in minutes: everything that Prefect waits for, more often
QUICK = {
    "PREFECT_WORKER_QUERY_SECONDS": "1",
    "PREFECT_SERVER_SERVICES_SCHEDULER_LOOP_SECONDS": "3",
    "PREFECT_SERVER_SERVICES_LATE_RUNS_LOOP_SECONDS": "2",
    "PREFECT_SERVER_SERVICES_EVENT_PERSISTER_FLUSH_INTERVAL": "1",
}
QUIET = {
    "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "DVC_NO_ANALYTICS": "1",
    "DO_NOT_TRACK": "true",
    "HF_HUB_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "OMP_NUM_THREADS": "1",
    "OMP_WAIT_POLICY": "PASSIVE",
}
OTHERS = ("PREFECT_", "MLFLOW_", "DVC_", "GIT_", "UNIDEC_")  # of whoever runs the tests: not ours


class PrefectServer:
    """A Prefect server with a home and a port of its own, its workers, and what they run in a
    project's folder.
    """

    def __init__(self, project: Path, home: Path, **environment: str) -> None:
        self.port = free_port()
        self.api = f"http://127.0.0.1:{self.port}/api"
        self.project = project
        self.home = home
        own = {name: value for name, value in os.environ.items() if not name.startswith(OTHERS)}
        self.environment = own | QUIET | QUICK | environment
        self.environment |= {
            "PREFECT_HOME": str(home),
            "PREFECT_API_URL": self.api,
            "UNIDEC_PYTHON": sys.executable,
            "GIT_CONFIG_GLOBAL": os.devnull,
        }
        self.server: subprocess.Popen[bytes] | None = None
        self.workers: list[subprocess.Popen[bytes]] = []
        home.mkdir(parents=True, exist_ok=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()

    # -- processes
    # ----------------------------------------------------------------------------------------------

    def start(self, seconds: float = 120) -> None:
        """`prefect server start`, until it answers; started again it continues with the same
        database.
        """
        self.server = self._start(
            "server.log", "server", "start", "--host", "127.0.0.1", "--port", str(self.port)
        )
        self.wait(lambda: self.ask("health"), "healthy server", seconds)

    def deploy(self) -> None:
        """`prefect work-pool create` where there is none, and `prefect deploy --all`."""
        if not any(pool["name"] == "local" for pool in self.ask("work_pools/filter", {})):
            self.command("work-pool", "create", "local", "--type", "process")
        self.command("--no-prompt", "deploy", "--all")

    def start_worker(self) -> subprocess.Popen[bytes]:
        """`prefect worker start`; does not wait for it."""
        self.workers.append(self._start("worker.log", "worker", "start", "--pool", "local"))
        return self.workers[-1]

    def command(self, *words: str, seconds: float = 120) -> str:
        """`prefect <words>`, which must go well; returns what it printed."""
        done = subprocess.run(
            [sys.executable, "-m", "prefect", *words],
            cwd=self.project,
            env=self.environment,
            capture_output=True,
            text=True,
            timeout=seconds,
            check=False,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def kill_server(self) -> None:
        """SIGKILL: the database stays as it is."""
        assert self.server is not None
        self._kill(self.server)
        self.server = None

    def kill_workers(self, *, flows: bool = True) -> None:
        """SIGKILL to every worker, and with `flows` to all that they run."""
        for worker in self.workers:
            self._kill(worker)
        self.workers.clear()
        if flows:
            self._kill_left(keep=self.server)

    def stop(self) -> None:
        """SIGKILL to everything that carries this server's home in its environment."""
        self.kill_workers(flows=False)
        if self.server is not None:
            self.kill_server()
        self._kill_left()

    def left(self) -> dict[int, str]:
        """Processes that carry this server's home in their environment (Linux): pid -> command
        line.
        """
        mark = f"PREFECT_HOME={self.home}".encode()
        found = {}
        for entry in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                if mark in (entry / "environ").read_bytes().split(b"\0"):
                    words = (
                        (entry / "cmdline")
                        .read_bytes()
                        .replace(b"\0", b" ")
                        .decode(errors="replace")
                    )
                    found[int(entry.name)] = words.strip()
        return found

    def flow_processes(self) -> dict[int, str]:
        """Of these, the ones that are neither the server nor a worker: flow runs and what they
        started.
        """
        known = (" server start ", " worker start ", "uvicorn", "prefect.server")
        return {
            pid: words
            for pid, words in self.left().items()
            if words and not any(one in words for one in known)
        }

    def _start(self, log: str, *words: str) -> subprocess.Popen[bytes]:
        with (self.home / log).open("ab") as file:
            return subprocess.Popen(
                [sys.executable, "-m", "prefect", *words],
                cwd=self.project,
                env=self.environment,
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def _kill(self, process: subprocess.Popen[bytes]) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait(10)

    def _kill_left(self, keep: subprocess.Popen[bytes] | None = None) -> None:
        for _ in range(20):  # what is killed may be starting another meanwhile
            kept = (
                set()
                if keep is None
                else {pid for pid in self.left() if os.getpgid(pid) == keep.pid}
            )
            found = set(self.left()) - kept
            if not found:
                return
            for pid in found:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.1)

    # -- what the server knows
    # ------------------------------------------------------------------------------------

    def ask(self, path: str, body: Any = None, method: str | None = None) -> Any:
        """The REST API: GET without a body, POST with one."""
        request = urllib.request.Request(
            f"{self.api}/{path}",
            data=None if body is None else json.dumps(body).encode(),
            headers={"Content-Type": "application/json"},
            method=method,
        )
        for left in range(10, -1, -1):
            try:
                with urllib.request.urlopen(request, timeout=20) as answer:
                    text = answer.read()
                return json.loads(text) if text else None
            # 503: SQLite is locked by another; nothing was written
            except urllib.error.HTTPError as error:
                if error.code != 503 or not left:
                    raise
                time.sleep(1)
        raise AssertionError("not reached")

    def deployment(self, name: str) -> dict[str, Any]:
        """`deployment("unidec/train")`."""
        return self.ask(f"deployments/name/{name}")

    def run(self, name: str, **parameters: Any) -> str:
        """Asks for a run of a deployment, as `prefect deployment run` does; returns its id."""
        body = {"parameters": parameters, "state": {"type": "SCHEDULED"}}
        return self.ask(f"deployments/{self.deployment(name)['id']}/create_flow_run", body)["id"]

    def flow_run(self, run: str) -> dict[str, Any]:
        return self.ask(f"flow_runs/{run}")

    def runs(self, name: str) -> list[dict[str, Any]]:
        """All runs of a deployment, the earliest expected first."""
        body = {
            "deployments": {"id": {"any_": [self.deployment(name)["id"]]}},
            "sort": "EXPECTED_START_TIME_ASC",
            "limit": 200,
        }
        return self.ask("flow_runs/filter", body)

    def tasks(self, run: str) -> dict[str, str]:
        """A run's tasks so far: name -> kind of state."""
        body = {
            "flow_runs": {"id": {"any_": [run]}},
            "sort": "EXPECTED_START_TIME_ASC",
            "limit": 200,
        }
        return {task["name"]: task["state_type"] for task in self.ask("task_runs/filter", body)}

    def artifacts(self, run: str) -> dict[str, Any]:
        """A run's artifacts: key -> what they hold (Markdown, rows as JSON, a link)."""
        body = {"artifacts": {"flow_run_id": {"any_": [run]}}, "limit": 200}
        return {one["key"] or one["id"]: one["data"] for one in self.ask("artifacts/filter", body)}

    def events(self, name: str) -> list[dict[str, Any]]:
        """Events of a kind (`unidec.drift`), the newest first."""
        body = {"filter": {"event": {"name": [name]}}, "limit": 50}
        return self.ask("events/filter", body)["events"]

    def log_of(self, run: str) -> str:
        """What a run said, a line each."""
        lines: list[str] = []
        while True:
            body = {
                "logs": {"flow_run_id": {"any_": [run]}},
                "sort": "TIMESTAMP_ASC",
                "limit": 200,
                "offset": len(lines),
            }
            some = self.ask("logs/filter", body)
            lines += [line["message"] for line in some]
            if len(some) < 200:
                return "\n".join(lines)

    def log(self, name: str) -> str:
        return (self.home / name).read_text(errors="replace") if (self.home / name).exists() else ""

    def errors(self) -> list[str]:
        """Errors that the server or a worker met, but for SQLite's own under load (these are tried
        again).
        """
        lines = (self.log("server.log") + self.log("worker.log")).splitlines()
        found = [line for line in lines if re.match(r"[A-Za-z_][\w.]*(Error|Exception)\b", line)]
        return [line for line in found if "database is locked" not in line]

    # -- waiting
    # ----------------------------------------------------------------------------------------------

    def wait(self, true: Callable[[], Any], what: str, seconds: float, every: float = 0.5) -> Any:
        """What `true` returns once that is true; the servers must stay alive meanwhile."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            with contextlib.suppress(urllib.error.URLError, ConnectionError, TimeoutError):
                found = true()
                if found:
                    return found
            ours = [*self.workers, *([self.server] if self.server else [])]
            assert all(process.poll() is None for process in ours), (
                f"ended early: {self.all_logs()}"
            )
            time.sleep(every)
        raise AssertionError(f"no {what} after {seconds} s\n{self.all_logs()}")

    def ended(self, run: str, seconds: float = 300) -> dict[str, Any]:
        """A run, once it is over."""

        def over() -> dict[str, Any] | None:
            found = self.flow_run(run)
            return found if found["state_type"] in ENDED else None

        return self.wait(over, f"end of run {run}", seconds)

    def completed(self, run: str, seconds: float = 300) -> dict[str, Any]:
        """A run that must end well."""
        found = self.ended(run, seconds)
        assert found["state_type"] == "COMPLETED", (
            f"{found['state']['message']}\n{self.log_of(run)}"
        )
        return found

    def all_logs(self) -> str:
        return "\n".join(
            f"--- {path.name}\n{path.read_text(errors='replace')[-6000:]}"
            for path in self.home.glob("*.log")
        )
