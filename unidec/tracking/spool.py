"""What a run's tracking store has not got yet, in the run's folder: it outlives the process that logged it.

Figures are lines of `pending-metrics.jsonl`, appended: hours without a server must not cost training more each minute.
Files are copied to `pending-files/`: who logged them may overwrite or remove them before they can be sent.
"""

from __future__ import annotations

import contextlib
import json
import logging
import shutil
import time
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path

from unidec.data.storage import write_bytes_atomic

Point = tuple[str, float, int, int]  # name, value, step (-1: a figure without steps), milliseconds since 1970

PENDING, FILES = "pending-metrics.jsonl", "pending-files"

log = logging.getLogger(__name__)


def metric_name(name: str) -> str:
    """MLflow allows no "@" in a name: "P@1" -> "P_at_1"."""
    return name.replace("@", "_at_")


def now_ms() -> int:
    """Milliseconds since 1970."""
    return int(time.time() * 1000)


def new_points(step: int, metrics: Mapping[str, float]) -> list[Point]:
    """Metrics of one step as points of this moment; step -1: without steps."""
    now = now_ms()
    return [(metric_name(name), float(value), int(step), now) for name, value in metrics.items()]


class Spool:
    """Figures and files that wait in a run's folder.

    Attributes:
        path: the folder; a kept file's name is relative to it.
    """

    def __init__(self, path: Path) -> None:
        self.path, self._path, self._files = path, path / PENDING, path / FILES
        self._lines = self._bytes = 0  # what of the list given last is in the file, which then had so many bytes

    def read(self) -> list[Point]:
        """Every figure that waits, in the order in which it was logged; a line that a kill cut off is passed over."""
        points: list[Point] = []
        try:
            data = self._path.read_bytes()
        except OSError:
            data = b""
        for line in data.splitlines():
            try:
                name, value, step, at = json.loads(line)
                points.append((str(name), float(value), int(step), int(at)))
            except (ValueError, TypeError):
                log.warning("%s: a figure that was cut off is passed over", self._path)
                data = b""  # so the next `write` begins anew
        self._lines, self._bytes = len(points), len(data)
        return points

    def write(self, points: Sequence[Point], begun_anew: bool) -> None:
        """Keeps the figures that wait; begun_anew: others than the last call's stand at their front."""
        if not points:
            self._path.unlink(missing_ok=True)
            self._lines = self._bytes = 0
            return
        size = self._path.stat().st_size if self._path.is_file() else -1
        if begun_anew or size != self._bytes or not self._lines:  # another tracker of this run wrote, too
            data = _lines(points)
            write_bytes_atomic(self._path, data)
            self._bytes = len(data)
        elif len(points) > self._lines:
            data = _lines(points[self._lines :])
            with self._path.open("ab") as file:
                file.write(data)
            self._bytes += len(data)
        self._lines = len(points)

    def keep_file(self, name: str) -> str:
        """A copy of a file or folder for later: its name. One that is kept already, or is gone, keeps its own."""
        path = self.path / name
        if self._files in path.parents or not path.exists():
            return name
        target = self._files / uuid.uuid4().hex[:12] / path.name
        target.parent.mkdir(parents=True)
        if path.is_dir():
            shutil.copytree(path, target)
        else:
            shutil.copyfile(path, target)
        return target.relative_to(self.path).as_posix()

    def drop_file(self, name: str) -> None:
        """Removes a copy that was sent; anybody else's file stays."""
        path = self.path / name
        if self._files in path.parents:
            shutil.rmtree(path.parent, ignore_errors=True)
            with contextlib.suppress(OSError):  # others wait there
                self._files.rmdir()


def _lines(points: Sequence[Point]) -> bytes:
    return "".join(json.dumps(point) + "\n" for point in points).encode()
