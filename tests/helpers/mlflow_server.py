"""A real MLflow server on this machine that tests kill and start again, and a way to it that loses
answers.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

from helpers.ports import free_port

from unidec.tracking.store import prepare_store


def wait_for(url: str, process: subprocess.Popen, log: Path, seconds: float = 90.0) -> None:
    """Until a health check answers.

    Raises:
        AssertionError: the process ended, or nothing answered; with the end of its log.
    """
    end = time.monotonic() + seconds
    while time.monotonic() < end and process.poll() is None:
        with contextlib.suppress(OSError), urllib.request.urlopen(url, timeout=5):
            return
        time.sleep(0.2)
    raise AssertionError(f"{url} does not answer:\n{log.read_text(errors='replace')[-3000:]}")


class MlflowServer:
    """`mlflow server` in a process group of its own, always at the same port; `kill` is SIGKILL.

    Args:
        folder: its database, artifacts and log.
        store: another database than SQLite.
    """

    def __init__(self, folder: Path, store: str | None = None) -> None:
        self.folder = folder
        self.port = free_port()
        self.store = store or prepare_store(f"sqlite:///{folder / 'store' / 'mlflow.db'}")
        self.uri = f"http://127.0.0.1:{self.port}"
        self.process: subprocess.Popen | None = None

    def start(self) -> None:
        environment = {
            name: value
            for name, value in os.environ.items()
            if not name.startswith(("MLFLOW_", "GIT_"))
        }
        environment |= {
            "MLFLOW_DISABLE_TELEMETRY": "true",
            "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false",
        }
        words = [
            "server",
            "--backend-store-uri",
            self.store,
            "--artifacts-destination",
            str(self.folder / "artifacts"),
        ]
        words += ["--host", "127.0.0.1", "--port", str(self.port), "--workers", "1"]
        log = self.folder / "server.log"
        with log.open("ab") as file:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "mlflow", *words],
                cwd=self.folder,
                env=environment,
                stdout=file,
                stderr=file,
                start_new_session=True,
            )
        wait_for(f"{self.uri}/health", self.process, log)

    def kill(self) -> None:
        if self.process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait(20)
            self.process = None

    @contextlib.contextmanager
    def running(self) -> Iterator[MlflowServer]:
        try:
            self.start()
            yield self
        finally:
            self.kill()


class LossyProxy:
    """A way to a server on which requests or answers get lost, also on connections that are open
    already.

    Attributes:
        fault: "": none; "refuse": each request closes the connection; "answer": the
            request arrives, its answer is lost; "hang": nothing is ever answered; "some": the
            answers of `lost` are lost.
        lost: called with each request's first bytes; whether its answer is lost.
        connections: how many were made.
    """

    def __init__(self, port: int) -> None:
        self._target = port
        self.fault = ""
        self.connections = 0
        self.lost: Callable[[bytes], bool] = lambda _request: False
        self._listening = socket.create_server(("127.0.0.1", 0))
        self.uri = f"http://127.0.0.1:{self._listening.getsockname()[1]}"
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        # a thread that waits in `accept` would keep the port open
        with contextlib.suppress(OSError):
            self._listening.shutdown(socket.SHUT_RDWR)
        self._listening.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = self._listening.accept()
                self.connections += 1
                server = socket.create_connection(("127.0.0.1", self._target), 30)
                doomed = [False]  # whether the answer to this connection's last request is lost
                for source, target, lost in (
                    (client, server, "refuse"),
                    (server, client, "answer"),
                ):
                    threading.Thread(
                        target=self._carry, args=(source, target, lost, doomed), daemon=True
                    ).start()

    def _carry(
        self, source: socket.socket, target: socket.socket, lost: str, doomed: list[bool]
    ) -> None:
        methods = (b"GET ", b"POST ", b"PUT ", b"PATCH ", b"DELETE ", b"HEAD ")
        with source, target, contextlib.suppress(OSError):
            while data := source.recv(65536):
                while self.fault == "hang":
                    time.sleep(0.02)
                if self.fault == lost:
                    break
                if self.fault == "some" and lost == "refuse" and data.startswith(methods):
                    doomed[0] = self.lost(data)
                if self.fault == "some" and lost == "answer" and doomed[0]:
                    break
                target.sendall(data)
            for end in (source, target):
                end.shutdown(socket.SHUT_RDWR)
