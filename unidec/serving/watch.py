"""The registry, asked by a process of its own: `python -m unidec.serving.watch`.

MLflow takes seconds to import, some 170 MB and its own time to notice that a server hangs. None of that is the
server's: what does not answer is a process that is killed, and asked anew by another.

One JSON object a line. Requests: {"do": "look"}, or {"do": "fetch", "version": "7", "max_bytes": n}. Answers:
{"found": {...}}, {"found": null, "missing": why}, {"folder": path, "fetched": bool}, {"refused": why} (it stays so), or
{"away": why} (it may pass).
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from unidec.errors import ArtifactError, ConfigError, UnidecError
from unidec.serving.children import answer_pipe, end_child, end_with_parent, start_child
from unidec.tracking.fetch import Address, fetch_bundle
from unidec.tracking.store import tracking_uri

START_SECONDS = 90.0  # more for the first answer: imports on a busy machine
LOOK_SECONDS = 60.0  # MLflow gives a server 20 s, three times
FETCH_SECONDS = 3600.0
_MAX_FILES = 10_000  # of a stored version; the code that MLflow stores with it has some hundred
_NICE = 10
_MESSAGE = 2000
_SLACK = 64 << 20  # bytes


class RegistryAway(UnidecError):
    """The registry did not answer, or not in time: it may later."""


@dataclass(frozen=True)
class Found:
    """The version that an address stands for now.

    Attributes:
        version: its number; None of a folder. sha256: its bundle's hash, as its tag says; "" without one.
        data: hash of the data set that it was trained on; None where no tag says.
    """

    version: str | None
    sha256: str
    data: str | None = None


class Watch:
    """Asks the registry what an address stands for, and fetches bundles. For one thread; `close` from any.

    Args:
        address: what is followed.
        folder: where copies of bundles are kept, by hash.
        uri: the tracking store.

    Attributes:
        missing: after a look that found nothing: the error that lists what the registry has.
    """

    def __init__(self, address: Address, folder: Path, uri: str) -> None:
        self.address, self.folder, self.uri = address, folder, uri
        self.missing = ""
        self._child: subprocess.Popen[bytes] | None = None
        self._answers: queue.Queue[bytes] = queue.Queue()
        self._fresh, self._closing = True, threading.Lock()

    def prepare(self) -> None:
        """Starts the process, so that its imports run beside ours; `look` and `fetch` do it where it was not done."""
        if self._child is None:
            where = {"folder": str(self.folder), **asdict(self.address)}
            # the address in the environment, not among the arguments, which every user of the machine can list
            self._child = start_child("unidec.serving.watch", json.dumps(where), MLFLOW_TRACKING_URI=self.uri)
            self._answers, self._fresh = queue.Queue(), True
            threading.Thread(
                target=_read_lines, args=(self._child, self._answers), daemon=True, name="unidec-watch"
            ).start()

    def look(self, seconds: float = LOOK_SECONDS) -> Found | None:
        """The version that the address stands for; None where there is no such model, alias or version.

        Raises:
            RegistryAway: no answer.
        """
        answer = self._ask({"do": "look"}, seconds)
        self.missing = answer.get("missing", "")
        return None if answer["found"] is None else Found(**answer["found"])

    def fetch(self, found: Found, max_bytes: int, seconds: float = FETCH_SECONDS) -> tuple[Path, bool]:
        """The folder of a version's bundle, every file's hash checked, and whether it was fetched now.

        Raises:
            ArtifactError: it holds more than `max_bytes`, is damaged, or is not what its tag says.
            RegistryAway: no answer.
        """
        answer = self._ask({"do": "fetch", "version": found.version, "max_bytes": max_bytes}, seconds)
        return Path(answer["folder"]), bool(answer["fetched"])

    def close(self) -> None:
        """Ends the process; a call that waits for it raises RegistryAway."""
        with self._closing:
            child, self._child = self._child, None
        if child is not None:
            end_child(child)

    def _ask(self, request: dict[str, Any], seconds: float) -> dict[str, Any]:
        try:
            self.prepare()
            child = self._child
            if child is None or child.stdin is None:
                raise RegistryAway("closed", where=self.uri)
            child.stdin.write(json.dumps(request).encode() + b"\n")
            child.stdin.flush()
            line = self._answers.get(timeout=seconds + (START_SECONDS if self._fresh else 0.0))
        except (OSError, ValueError) as error:  # it died; a closed pipe is a ValueError
            self.close()
            raise RegistryAway("the process that asks the registry ended", where=self.uri, got=error) from error
        except queue.Empty as error:
            self.close()
            raise RegistryAway(
                "the registry does not answer", where=self.uri, got=f"nothing in {seconds:.0f} s"
            ) from error
        if not line:
            code = child.poll()
            self.close()
            raise RegistryAway("the process that asks the registry ended", where=self.uri, got=f"exit code {code}")
        self._fresh = False
        answer: dict[str, Any] = json.loads(line)
        if "away" in answer:
            raise RegistryAway("the registry does not answer", where=self.uri, got=answer["away"])
        if "refused" in answer:
            raise ArtifactError(answer["refused"])
        return answer


def _read_lines(child: subprocess.Popen[bytes], answers: queue.Queue[bytes]) -> None:
    """Every line of a child's output, and b"" at its end."""
    assert child.stdout is not None
    with contextlib.suppress(OSError, ValueError):  # closed
        for line in child.stdout:
            answers.put(line)
    answers.put(b"")


class _Asked:
    """The child's side: MLflow's client, held open."""

    def __init__(self, uri: str, folder: str, name: str, alias: str | None, version: str | None) -> None:
        from unidec.tracking.store import open_client

        self.uri, self.folder, self.name, self.which = uri, Path(folder), name, alias or version or ""
        self.client = open_client(uri)

    def look(self) -> dict[str, Any]:
        from unidec.tracking.promotion import known_version
        from unidec.tracking.registry import HASH_TAG

        try:
            version = known_version(self.client, self.name, self.which)
        except ConfigError as error:
            return {"found": None, "missing": str(error)}
        tags = version.tags
        found = Found(str(version.version), tags.get(HASH_TAG, ""), tags.get("dataset.sha256"))
        return {"found": asdict(found)}

    def fetch(self, version: str, max_bytes: int) -> dict[str, Any]:
        from unidec.tracking.registry import tracking_to

        before = {path.name for path in self.folder.glob("*")} if self.folder.is_dir() else set()
        address = f"models:/{self.name}/{version}"
        with tracking_to(self.uri):
            stored = stored_bytes(address, max_bytes)
        if stored > max_bytes:
            raise ArtifactError(
                f"version {version} of {self.name} is too large for the memory that is left", where=self.uri,
                got=f"{stored / 1e6:,.0f} MB", expected=f"at most {max_bytes / 1e6:,.0f} MB",
            )  # fmt: skip
        with _bounded_files(max(stored + _SLACK, 4 * _SLACK)):
            folder = fetch_bundle(address, self.folder, uri=self.uri)
        return {"folder": str(folder.resolve()), "fetched": folder.name not in before}


def stored_bytes(address: str, enough: int) -> int:
    """Size of all files that the registry lists for a version, or a part of it that is more than `enough`; within
    `tracking_to`.

    Raises:
        ArtifactError: so many files that it is no bundle.
    """
    from mlflow.store.artifact.artifact_repository_registry import get_artifact_repository

    repository, folders, total, files = get_artifact_repository(address), [""], 0, 0
    while folders and total <= enough:
        for entry in repository.list_artifacts(folders.pop() or None):
            files += 1
            if files > _MAX_FILES:
                raise ArtifactError("no bundle: too many files", where=address, expected=f"at most {_MAX_FILES:,}")
            if entry.is_dir:
                folders.append(entry.path)
            else:
                total += entry.file_size or 0
    return total


@contextlib.contextmanager
def _bounded_files(most: int) -> Iterator[None]:
    """No file that this process writes inside gets larger, whatever a store that lies about sizes sends."""
    try:
        import resource
    except ImportError:  # Windows
        yield
        return
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    fits = hard < 0 or most < hard
    resource.setrlimit(resource.RLIMIT_FSIZE, (most if fits else hard, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def _answer(asked: _Asked, request: dict[str, Any]) -> dict[str, Any]:
    from mlflow.exceptions import MlflowException

    try:
        if request["do"] == "look":
            return asked.look()
        return asked.fetch(request["version"], request["max_bytes"])
    except (ArtifactError, ConfigError) as error:
        return {"refused": str(error)[:_MESSAGE]}
    except (MlflowException, OSError) as error:
        said = f"{type(error).__name__}: {error}"[:_MESSAGE]
        if request["do"] == "look":
            return {"away": said}
        try:  # is it the registry, or this version?
            asked.look()
        except (MlflowException, OSError):
            return {"away": said}
        return {"refused": said}


def main() -> None:
    """The child: answers until its input ends."""
    end_with_parent()
    answers = answer_pipe()
    from mlflow.exceptions import MlflowException

    asked = None
    for number, line in enumerate(sys.stdin.buffer):
        try:
            asked = asked or _Asked(tracking_uri(), **json.loads(sys.argv[1]))
            answer = _answer(asked, json.loads(line))
        except (MlflowException, OSError, UnidecError) as error:  # of opening the store
            answer = {"away": f"{type(error).__name__}: {error}"[:_MESSAGE]}
        os.write(answers, json.dumps(answer).encode() + b"\n")
        if number == 0:  # the first answer is what a start waits for
            with contextlib.suppress(OSError, AttributeError):
                os.nice(_NICE)


if __name__ == "__main__":
    main()
