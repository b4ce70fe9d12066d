"""A real `unidec serve` that follows an alias of a real registry (SQLite), with versions whose
answers differ.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from unidec.data.storage import folder_sha256
from unidec.tracking.store import open_client

NAME = "served"
ALIAS = "champion"
PATIENCE = 120.0  # seconds for anything, on a machine that is busy with other things
CLOSE = 1e-4  # of two scores that are the same


class FollowedRegistry:
    """A registry of versions "1", "2", ...; version n's bundle is made with seed n.

    Args:
        root: everything is kept there. make_bundle: of `served_bundle`.
        num_labels: of each bundle.

    Attributes:
        client: of the registry. expected: hash -> text -> (uids, scores), as the bundle itself
        answers.
    """

    def __init__(
        self, root: Path, make_bundle: Callable[..., Path], versions: int = 3, num_labels: int = 300
    ) -> None:
        self.root = root
        self._make = make_bundle
        self._num = num_labels
        self.uri = f"sqlite:///{root / 'store' / 'mlflow.db'}"
        self.client = open_client(self.uri)
        self.client.create_registered_model(NAME)
        self.hashes: dict[str, str] = {}
        for seed in range(1, versions + 1):
            self.add(self.make(f"made-{seed}", seed))
        self.point("1")

    def make(self, name: str, seed: int) -> Path:
        """A bundle where MLflow would have stored it; returns the stored model's folder."""
        stored = self.root / name
        (stored / "artifacts").mkdir(parents=True)
        made = self._make(self.root / f"{name}-parts", num_labels=self._num, seed=seed)
        made.rename(stored / "artifacts" / "bundle")
        return stored

    def add(self, stored: Path, sha256: str | None = None) -> str:
        """Registers it under its hash, or under one that is not its; returns the
        version's number.
        """
        sha256 = sha256 or folder_sha256(stored / "artifacts" / "bundle")
        version = self.client.create_model_version(
            NAME, source=stored.as_uri(), tags={"bundle.sha256": sha256}
        ).version
        self.hashes[str(version)] = sha256
        return str(version)

    def bundle(self, version: str) -> Path:
        """The folder of one that was made here."""
        return self.root / f"made-{version}" / "artifacts" / "bundle"

    def point(self, version: str) -> None:
        """Moves the alias."""
        self.client.set_registered_model_alias(NAME, ALIAS, version)

    @contextlib.contextmanager
    def serving(self, *assignments: str, **environment: str) -> Iterator[ServingProcess]:
        """`unidec serve models:/served@champion`, ready; ended by SIGTERM, with exit code 0."""
        server = ServingProcess(
            self.root / "project", self.uri, f"models:/{NAME}@{ALIAS}", assignments, environment
        )
        try:
            server.until_ready()
            yield server
            assert server.end() == 0, server.log
        finally:
            server.kill()


class ServingProcess:
    """The process. Its log is a file: no pipe that fills."""

    def __init__(
        self, folder: Path, uri: str, source: str, assignments: Any, environment: dict[str, str]
    ) -> None:
        folder.mkdir(exist_ok=True)
        words = [sys.executable, "-m", "unidec.cli", "serve", source, "--port", "0"]
        words += [word for assignment in assignments for word in ("--set", assignment)]
        self._log = folder / "server.log"
        self.begun = time.monotonic()
        with self._log.open("wb") as file:
            self.process = subprocess.Popen(
                words,
                cwd=folder,
                stdout=file,
                stderr=file,
                start_new_session=True,
                env=os.environ | {"MLFLOW_TRACKING_URI": uri} | environment,
            )
        self.port = 0

    @property
    def log(self) -> str:
        return self._log.read_text(errors="replace")

    def until(self, true: Callable[[], Any], seconds: float = PATIENCE) -> float:
        """Seconds until it was true."""
        begun = time.monotonic()
        while not true():
            assert self.process.poll() is None, self.log
            assert time.monotonic() - begun < seconds, self.log
            time.sleep(0.02)
        return time.monotonic() - begun

    def until_ready(self) -> None:
        self.until(lambda: "serve: listening at " in self.log)
        self.port = int(self.log.partition("serve: listening at ")[2].split()[0].rpartition(":")[2])
        self.until(lambda: "serve: ready at " in self.log)

    def end(self) -> int:
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(30)

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait(30)

    def get(self, path: str) -> Any:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=30)
        with contextlib.closing(connection):
            connection.request("GET", path)
            body = connection.getresponse().read()
        return json.loads(body) if body[:1] == b"{" else body.decode()

    def follow(self) -> dict[str, Any]:
        return self.get("/readyz")["follow"]

    def version(self) -> str:
        """The version that answers."""
        return self.get("/version")["model"]["version"]

    def memory(self) -> tuple[int, int]:
        """Resident bytes of its own now, and the most that were resident at once."""
        found = dict(
            line.split(":", 1)
            for line in Path(f"/proc/{self.process.pid}/status").read_text().splitlines()
            if ":" in line
        )
        return tuple(int(found[name].split()[0]) * 1024 for name in ("RssAnon", "VmHWM"))  # type: ignore[return-value]


class Clients:
    """Threads that ask without a pause, and judge every answer.

    Args:
        expected: hash -> text -> (uids, scores).
        texts: asked three at a time, with ever other texts beside them that no cache knows.

    Attributes:
        answers: how many of each version's hash. wrong: what was no right answer. slow: seconds of
        each request.
    """

    def __init__(
        self, port: int, expected: dict[str, dict[str, Any]], texts: list[str], num: int = 4
    ) -> None:
        self._port = port
        self._expected = expected
        self._texts = texts
        self.answers: Counter[str] = Counter()
        self.wrong: list[str] = []
        self.seconds: list[tuple[float, float]] = []  # when, how long
        self._stop = threading.Event()
        self._lock = threading.Lock()
        self._threads = [
            threading.Thread(target=self._run, args=(number,), daemon=True) for number in range(num)
        ]

    def __enter__(self) -> Clients:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *error: Any) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join(PATIENCE)

    def _run(self, number: int) -> None:
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=PATIENCE)
        count = 0
        with contextlib.closing(connection):
            while not self._stop.is_set():
                count += 1
                first = (count * 7 + number) % len(self._texts)
                texts = [self._texts[(first + i) % len(self._texts)] for i in range(3)] + [
                    f"new {number} {count}"
                ]
                begun = time.monotonic()
                try:
                    connection.request(
                        "POST",
                        "/predict",
                        json.dumps({"queries": texts, "k": 4}),
                        {"content-type": "application/json"},
                    )
                    response = connection.getresponse()
                    body = response.read()
                    status = response.status
                except (OSError, http.client.HTTPException) as error:
                    self._note("", f"{type(error).__name__}: {error}", begun)
                    connection.close()
                    continue
                if status != 200:
                    self._note("", f"{status} {body[:200]!r}", begun)
                else:
                    answer = json.loads(body)
                    self._note(answer["model"]["sha256"], self._judged(answer, texts), begun)

    def _judged(self, answer: dict[str, Any], texts: list[str]) -> str:
        """What is wrong with an answer: all of it must be what the version that it names says."""
        expected = self._expected[answer["model"]["sha256"]]
        for text, found in zip(texts, answer["predictions"], strict=True):
            if text in expected:
                uids, scores = expected[text]
                got = [label["score"] for label in found["labels"]]
                if [label["uid"] for label in found["labels"]] != uids:
                    return f"other labels for {text}: {found['labels']}"
                if any(abs(a - b) > CLOSE for a, b in zip(got, scores, strict=True)):
                    return f"other scores for {text}: {got}, not {scores}"
        return ""

    def _note(self, sha256: str, wrong: str, begun: float) -> None:
        with self._lock:
            self.seconds.append((begun, time.monotonic() - begun))
            if sha256:
                self.answers[sha256] += 1
            if wrong:
                self.wrong.append(wrong)

    def percentile(self, share: float) -> float:
        """Milliseconds."""
        in_order = sorted(seconds for _, seconds in self.seconds)
        return 1000 * in_order[int(share * (len(in_order) - 1))]


def expected_of(
    bundle: Path, texts: list[str], k: int = 4
) -> dict[str, tuple[list[str], list[float]]]:
    """What a bundle answers, one text at a time: uids and scores."""
    from unidec.bundle.bundle import Bundle

    opened = Bundle.load(bundle)
    found = [opened.predict([text], k=k)[0] for text in texts]
    return {text: (one.labels, one.scores) for text, one in zip(texts, found, strict=True)}
