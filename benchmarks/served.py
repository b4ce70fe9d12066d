"""A server of ours in a process of its own, on this machine, for as long as a measurement takes."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from measure import status

HOST = "127.0.0.1"
START_SECONDS = 180.0
END_SECONDS = 20.0


def free_port() -> int:
    with socket.socket() as free:
        free.bind((HOST, 0))
        return int(free.getsockname()[1])


def wait_for_port(port: int, process: subprocess.Popen[bytes]) -> None:
    """Return when something accepts connections.

    Raises:
        RuntimeError: the process ended, or nothing listens after `START_SECONDS`.
    """
    end = time.monotonic() + START_SECONDS
    while process.poll() is None and time.monotonic() < end:
        with contextlib.suppress(OSError), socket.create_connection((HOST, port), 1.0):
            return
        time.sleep(0.05)
    raise RuntimeError(f"{process.args!r} does not listen on port {port}")


class Served:
    """`unidec serve` of a bundle, ready when entered, ended by SIGTERM; its exit code must be 0.

    Args:
        bundle: a folder, or `models:/name@alias`.
        assignments: parameters ("serve.batch_queries=1"). environment: further variables. folder:
        where it runs.

    Attributes:
        port, pid: of the server. log: what it wrote.
        listening_seconds, ready_seconds: from the process's start until /healthz, and until
        /readyz, answered 200.
    """

    def __init__(
        self,
        bundle: str | Path,
        *assignments: str,
        environment: Mapping[str, str] | None = None,
        folder: str | Path = ".",
    ) -> None:
        self.bundle = str(bundle)
        self.assignments = assignments
        self.folder = Path(folder)
        self.environment = os.environ | dict(environment or {})
        # set for programs beside it; a server decides by itself
        if "OMP_NUM_THREADS" not in (environment or {}):
            self.environment.pop("OMP_NUM_THREADS", None)
        self.port = free_port()
        self.pid = 0
        self.listening_seconds = self.ready_seconds = float("nan")
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        # open until __exit__
        self._file = tempfile.NamedTemporaryFile(prefix="unidec-serve-", suffix=".log")
        words = [
            sys.executable,
            "-m",
            "unidec.cli",
            "serve",
            self.bundle,
            "--host",
            HOST,
            "--port",
            str(self.port),
        ]
        words += [word for assignment in self.assignments for word in ("--set", assignment)]
        begun = time.monotonic()
        self._process = subprocess.Popen(
            words,
            cwd=self.folder,
            env=self.environment,
            stdout=self._file,
            stderr=self._file,
            start_new_session=True,
        )
        self.pid = self._process.pid
        try:
            self.listening_seconds = self._wait("/healthz", begun)
            self.ready_seconds = self._wait("/readyz", begun)
        except BaseException:
            self._kill()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        assert self._process is not None
        try:
            self._process.send_signal(signal.SIGTERM)
            code = self._process.wait(END_SECONDS)
            if code and error is None:
                raise RuntimeError(f"the server ended with exit code {code}:\n{self.log[-3000:]}")
        finally:
            self._kill()

    @property
    def log(self) -> str:
        """What it wrote until now."""
        return Path(self._file.name).read_text(errors="replace")

    def said_seconds(self) -> float | None:
        """What it says itself: seconds from its start, imports of the command line left out, until
        it was ready.
        """
        for _ in range(100):  # /readyz may be a little before the line
            if found := re.search(r"^serve: ready at .* after ([\d.]+) s", self.log, re.M):
                return float(found.group(1))
            time.sleep(0.02)
        return None

    def ask(self, path: str, what: Any = None) -> Any:
        """The JSON (or text) of one answer with status 200; what is given is posted.

        Raises:
            RuntimeError: another status.
        """
        connection = http.client.HTTPConnection(HOST, self.port, timeout=30)
        try:
            body = None if what is None else json.dumps(what).encode()
            connection.request(
                "GET" if body is None else "POST", path, body, {"content-type": "application/json"}
            )
            answer = connection.getresponse()
            text = answer.read().decode()
        finally:
            connection.close()
        if answer.status != 200:
            raise RuntimeError(f"{path}: {answer.status} {text[:500]}")
        return json.loads(text) if "json" in (answer.getheader("content-type") or "") else text

    def metrics(self) -> dict[str, float]:
        """The samples of /metrics: name, with labels as they stand there -> value."""
        lines = (
            line.rpartition(" ")
            for line in self.ask("/metrics").splitlines()
            if line and line[0] != "#"
        )
        return {name: float(value) for name, _, value in lines}

    def memory(self) -> dict[str, int]:
        """Bytes: VmRSS, RssAnon, RssFile, VmHWM."""
        found = status(self.pid)
        return {name: found[name] for name in ("VmRSS", "RssAnon", "RssFile", "VmHWM")}

    def cpu_seconds(self) -> float:
        """Processor time of all its threads, since it started."""
        fields = Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def _wait(self, path: str, begun: float) -> float:
        assert self._process is not None
        while time.monotonic() < begun + START_SECONDS:
            try:
                self.ask(path)
                return time.monotonic() - begun
            except (OSError, RuntimeError):
                if self._process.poll() is not None:
                    break
            time.sleep(0.01)
        raise RuntimeError(f"{path} does not answer 200:\n{self.log[-3000:]}")

    def _kill(self) -> None:
        """Whatever is left of its process group."""
        assert self._process is not None
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        self._process.wait(END_SECONDS)
        self._file.close()
