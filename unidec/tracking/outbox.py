"""What a run's tracking store has not confirmed yet, in the run's folder, so that it outlives the process.

`outbox.jsonl` has one entry a line; files are copied to `outbox-files/`, as the originals may be overwritten.
Entries are sent in order and dropped once the store has them all; sending one twice changes nothing.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import shutil
import threading
import uuid
from pathlib import Path
from typing import Any

from unidec.data.storage import write_bytes_atomic

OUTBOX, FILES = "outbox.jsonl", "outbox-files"

_changing = threading.Lock()  # a run belongs to one process at a time; its threads take turns

log = logging.getLogger(__name__)


class Outbox:
    """The entries and files of one run's folder that wait to be sent."""

    def __init__(self, run_dir: Path) -> None:
        self._path, self._files = run_dir / OUTBOX, run_dir / FILES

    def __bool__(self) -> bool:
        return self._path.exists()

    def add(self, entry: dict[str, Any]) -> None:
        """Append an entry: one write, about 30 microseconds. A disk that is full costs the entry, and a warning."""
        # the line break comes first: a line that a kill cut short spoils no other
        line = f"\n{json.dumps(entry)}".encode()
        try:
            with _changing, open(self._path, "ab", buffering=0, opener=_private) as file:
                file.write(line)
        except OSError as error:
            log.warning("not kept for the tracking store: %s", error)

    def add_files(self, path: Path, folder: str | None) -> None:
        """Copy a file or folder, to be sent to `folder` of the run's artifacts."""
        kept = self._files / uuid.uuid4().hex[:12] / path.name
        try:
            kept.parent.mkdir(parents=True)
            if path.is_dir():
                shutil.copytree(path, kept)
            else:
                shutil.copyfile(path, kept)
        except OSError as error:
            log.warning("not kept for the tracking store: %s", error)
            return
        self.add({"files": kept.relative_to(self._files).as_posix(), "folder": folder})

    def read(self) -> tuple[list[dict[str, Any]], int]:
        """The entries, oldest first, and how many bytes of the file they are."""
        data = self._path.read_bytes() if self else b""
        entries = []
        for line in filter(None, data.splitlines()):
            try:
                entries.append(dict(json.loads(line)))
            except (ValueError, TypeError):
                log.warning("%s: skipped an entry that was cut short", self._path)
        return entries, len(data)

    def file(self, name: str) -> Path:
        """The copy that an entry names."""
        return self._files / name

    def drop(self, entries: list[dict[str, Any]], num_bytes: int) -> None:
        """Remove the entries that `read` returned, with their files; later ones stay."""
        with _changing:
            rest = self._path.read_bytes()[num_bytes:]
            if rest:
                write_bytes_atomic(self._path, rest, mode=0o600)
            else:
                self._path.unlink()
        for entry in entries:
            if "files" in entry:
                shutil.rmtree(self.file(entry["files"]).parent, ignore_errors=True)
        with contextlib.suppress(OSError):  # not there, or others wait in it
            self._files.rmdir()


def _private(name: str, flags: int) -> int:
    return os.open(name, flags, 0o600)
