"""Work on many rows, cut into shards: each is a folder that is complete or absent, so that a killed run resumes with
the missing ones, and any process that sees the folder can write one.

    <folder>/plan.json           what is computed, and where it is cut (`Work`)
    <folder>/00003-of-00008/     one shard; its manifest (sizes, sha256) has the plan's key
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from unidec.data.storage import Folder, read_manifest, write_folder, write_json
from unidec.errors import ArtifactError, ConfigError
from unidec.version import __version__

PLAN = "plan.json"
MAX_SHARDS = 99_999
_OURS = re.compile(r"\..*|plan\.json|texts\.arrow|\d{5}-of-\d{5}")


@dataclass(frozen=True)
class Work:
    """A plan: what is computed, and where it is cut.

    Attributes:
        folder: of the plan and the shards, absolute.
        key: sha256 over what decides the result and the cuts; shards with another key are not used.
        bounds: shard i has the rows bounds[i] to bounds[i + 1] - 1.
        settings: what a worker needs, JSON: absolute paths and plain values.
    """

    folder: Path
    key: str
    bounds: tuple[int, ...]
    settings: dict[str, Any]

    @classmethod
    def begin(cls, folder: Path, facts: dict[str, Any], settings: dict[str, Any], bounds: tuple[int, ...]) -> Work:
        """Write the plan; shards of an earlier one count where `facts` (what decides the result: hashes and settings,
        JSON, no paths) and bounds are the same. Raises ArtifactError: the folder cannot be written."""
        text = json.dumps([__version__, facts, bounds], sort_keys=True)
        work = cls(folder, hashlib.sha256(text.encode()).hexdigest(), bounds, settings)
        write_json(folder / PLAN, {"key": work.key, "bounds": bounds, "settings": settings})
        return work

    @classmethod
    def open(cls, folder: str | os.PathLike[str]) -> Work:
        """The work whose plan is in a folder. Raises ArtifactError: no plan, or a damaged one."""
        path = Path(folder) / PLAN
        try:
            plan = json.loads(path.read_bytes())
            return cls(path.parent, plan["key"], tuple(plan["bounds"]), plan["settings"])
        except (OSError, ValueError, KeyError, TypeError) as error:
            fix = "run the command that wrote it again"
            raise ArtifactError("no readable plan of shards", where=str(path), got=str(error)[:200], fix=fix) from error

    @property
    def num_shards(self) -> int:
        return len(self.bounds) - 1

    @property
    def num_rows(self) -> int:
        return self.bounds[-1]

    def rows(self, number: int) -> tuple[int, int]:
        """First row of a shard (from 0), and the first behind it."""
        return self.bounds[number], self.bounds[number + 1]

    def size(self, number: int) -> int:
        return self.bounds[number + 1] - self.bounds[number]

    def name(self, number: int) -> str:
        """A shard as people see it: "shard 4 of 8 (rows 3,000 to 3,999)"."""
        first, last = self.rows(number)
        rows = f"rows {first:,} to {last - 1:,}" if last > first else "no rows"
        return f"shard {number + 1} of {self.num_shards} ({rows})"

    def path(self, number: int) -> Path:
        """A shard's folder."""
        return self.folder / f"{number:05d}-of-{self.num_shards:05d}"

    def is_whole(self, number: int) -> bool:
        """Whether a shard is there, undamaged (every hash is checked), and of this work."""
        try:
            meta = read_manifest(self.path(number), "shard", 1)["meta"]
        except (ArtifactError, OSError):
            return False
        return meta == {"key": self.key, "number": number}

    def missing(self) -> list[int]:
        """Shards that are still to be written, in order."""
        return [number for number in range(self.num_shards) if not self.is_whole(number)]

    def write(self, number: int) -> contextlib.AbstractContextManager[Folder]:
        """Write a shard as a whole; see `storage.write_folder`."""
        return write_folder(self.path(number), "shard", 1, {"key": self.key, "number": number})

    def remove(self) -> None:
        """Remove plan and shards: their result is written."""
        shutil.rmtree(self.folder, ignore_errors=True)


def shards_folder(output: str | os.PathLike[str]) -> Path:
    """The folder of an output's plan and shards until they are merged: `<output>.shards`."""
    path = Path(os.path.abspath(output))
    return path.with_name(f"{path.name}.shards")


@contextlib.contextmanager
def alone(folder: Path) -> Iterator[None]:
    """Hold the lock of a work's folder, from before its plan is written until its shards are merged; the system
    releases it when its holder dies.

    Raises:
        ArtifactError: another process holds it, the folder has other files, or it cannot be made.
    """
    from filelock import FileLock, Timeout

    foreign = sorted(path.name for path in folder.glob("*") if not _OURS.fullmatch(path.name))
    if foreign:
        raise ArtifactError("a folder of something else", where=str(folder), got=foreign[0], fix="move it away")
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ArtifactError("it cannot be written", where=str(folder), got=error.strerror) from error
    try:
        with FileLock(folder / ".lock", timeout=0):
            try:
                yield
            finally:
                if not (folder / PLAN).exists():  # nothing was begun, or all is done
                    shutil.rmtree(folder, ignore_errors=True)
    except Timeout as error:
        fix = "wait for it, or end it"
        raise ArtifactError("another process is at this work", where=str(folder), fix=fix) from error


def cuts(num_rows: int, shards: int, batch_size: int) -> tuple[int, ...]:
    """Bounds of nearly equal contiguous shards that begin at multiples of a batch; never more shards than batches.

    Raises:
        ConfigError: `shards` out of range.
    """
    if not 1 <= shards <= MAX_SHARDS:
        raise ConfigError("out of range", where="shards", got=shards, expected=f"1 to {MAX_SHARDS}")
    batches = -(-num_rows // batch_size)
    shards = max(1, min(shards, batches))
    return tuple(min(num_rows, batches * number // shards * batch_size) for number in range(shards + 1))
